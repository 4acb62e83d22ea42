//! `requant doctor`.

use super::errors::Failure;
use super::print;
use requant::kernels::cuda::{DeviceInfo, Setup, Survey, Unavailable, survey};
use serde_json::{Value, json};

/// Show what this machine has to compute with, and what to do about what it lacks.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {}

impl Arguments {
    pub(super) fn run(&self, json: bool) -> Result<(), Failure> {
        let survey = survey(&Setup::from_environment());
        let threads = rayon::current_num_threads();
        print::stdout(&match json {
            true => serde_json::to_string_pretty(&as_json(&survey, threads)).unwrap_or_default() + "\n",
            false => text(&survey, threads),
        })
    }
}

fn text(survey: &Survey, threads: usize) -> String {
    let mut text = String::new();
    let mut line = |name: &str, what: String| text.push_str(&format!("{name:<9} {what}\n"));
    line("CPU", format!("{threads} thread{}", if threads == 1 { "" } else { "s" }));
    match &survey.driver {
        Ok((major, minor)) => line("driver", format!("NVIDIA's, for CUDA up to {major}.{minor}")),
        Err(unavailable) => line("driver", missing(unavailable)),
    }
    for device in &survey.devices {
        match device {
            Ok(device) => line(&format!("cuda:{}", device.ordinal), in_words(device)),
            Err(unavailable) => line("GPU", missing(unavailable)),
        }
    }
    match &survey.compiler {
        Ok(compiler) => {
            let (major, minor) = compiler.version();
            line("NVRTC", format!("{major}.{minor}, {}", compiler.path().display()));
        }
        Err(unavailable) => line("NVRTC", missing(unavailable)),
    }
    match &survey.cache {
        Some(cache) => line("cache", cache.display().to_string()),
        None => line("cache", "none: HOME is not set; kernels are compiled each time".into()),
    }
    line("--device", format!("auto takes {}", taken(survey)));
    text
}

fn in_words(device: &DeviceInfo) -> String {
    let (major, minor) = device.compute_capability;
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let (free, total) = (gib(device.free_memory), gib(device.total_memory));
    format!("{}, compute capability {major}.{minor}, {free:.1} of {total:.1} GiB free", device.name)
}

fn missing(unavailable: &Unavailable) -> String {
    format!("{unavailable}\n          hint: {}", unavailable.hint())
}

/// What `--device auto` comes to: the first GPU, or the CPU.
fn taken(survey: &Survey) -> &'static str {
    match (survey.devices.first(), &survey.compiler) {
        (Some(Ok(_)), Ok(_)) => "cuda:0",
        _ => "the CPU",
    }
}

fn as_json(survey: &Survey, threads: usize) -> Value {
    let problem =
        |unavailable: &Unavailable| json!({ "problem": unavailable.to_string(), "hint": unavailable.hint() });
    let version = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    let devices: Vec<Value> = survey
        .devices
        .iter()
        .map(|device| match device {
            Ok(device) => json!({
                "device": format!("cuda:{}", device.ordinal),
                "name": device.name,
                "compute_capability": version(device.compute_capability),
                "total_memory": device.total_memory,
                "free_memory": device.free_memory,
            }),
            Err(unavailable) => problem(unavailable),
        })
        .collect();
    json!({
        "cpu": { "threads": threads },
        "driver": match &survey.driver {
            Ok(driver) => json!({ "cuda": version(*driver) }),
            Err(unavailable) => problem(unavailable),
        },
        "devices": devices,
        "nvrtc": match &survey.compiler {
            Ok(compiler) => json!({ "version": version(compiler.version()), "path": compiler.path() }),
            Err(unavailable) => problem(unavailable),
        },
        "cache": survey.cache,
        "auto": if taken(survey) == "cuda:0" { "cuda:0" } else { "cpu" },
    })
}
