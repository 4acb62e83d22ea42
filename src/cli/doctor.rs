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
            Ok(device) => line(&format!("cuda:{}", device.ordinal), of_device(device)),
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

/// Free memory below which a device is said to be short of it: models of a few billion weights don't stay there.
const LITTLE_MEMORY: u64 = 4 << 30;

/// What follows from little memory, and what to do about it.
fn shortage(device: &DeviceInfo) -> Option<&'static str> {
    (device.free_memory < LITTLE_MEMORY).then_some(
        "little memory is free: larger models are loaded block by block, in smaller pieces or at last on the CPU; \
         nvidia-smi shows which programs use the GPU",
    )
}

fn of_device(device: &DeviceInfo) -> String {
    match shortage(device) {
        Some(hint) => format!("{}\n          hint: {hint}", in_words(device)),
        None => in_words(device),
    }
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

/// What `--device auto` comes to: all GPUs that can be used, or the CPU.
fn taken(survey: &Survey) -> String {
    let names: Vec<String> = match &survey.compiler {
        Ok(_) => survey.devices.iter().flatten().map(|device| format!("cuda:{}", device.ordinal)).collect(),
        Err(_) => Vec::new(),
    };
    if names.is_empty() { "the CPU".into() } else { names.join(", ") }
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
                "hint": shortage(device),
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
        "auto": if taken(survey) == "the CPU" { "cpu".into() } else { taken(survey) },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(ordinal: usize, free_gib: u64) -> DeviceInfo {
        DeviceInfo {
            ordinal,
            name: "GPU".into(),
            compute_capability: (8, 6),
            total_memory: 8 << 30,
            free_memory: free_gib << 30,
        }
    }

    fn survey_of(devices: Vec<Result<DeviceInfo, Unavailable>>) -> Survey {
        Survey { driver: Ok((13, 0)), devices, compiler: Err(Unavailable::NoCompiler), cache: None }
    }

    #[test]
    fn a_device_with_2_gib_free_is_told_what_follows() {
        let survey = survey_of(vec![Ok(device(0, 2)), Ok(device(1, 8))]);
        let text = text(&survey, 1);
        assert!(
            text.contains(
                "cuda:0    GPU, compute capability 8.6, 2.0 of 8.0 GiB free\n          hint: little"
            )
        );
        assert!(text.contains("cuda:1    GPU, compute capability 8.6, 8.0 of 8.0 GiB free\nNVRTC"), "{text}");
        let json = as_json(&survey, 1);
        assert!(json["devices"][0]["hint"].as_str().unwrap().contains("block by block"));
        assert!(json["devices"][1]["hint"].is_null());
    }
}
