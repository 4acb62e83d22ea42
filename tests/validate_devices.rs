//! Validation on devices with memory of their own: what fits where, what happens when it doesn't, and several.
#![allow(clippy::unwrap_used, reason = "the exception for tests leaves out what test functions share")]

mod support;

use requant::kernels::{Cpu, Error, Operations};
use requant::progress::{DeviceMemory, Event, Observer, Silent};
use requant::validate::{Layers, Options, SwapIn, Validation, validate, validate_on};
use requant::{Diagnose, WarningCode};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use support::binary::{Converted, FIXTURE, convert};
use support::device::Pretended;
use support::open;

const MIB: i64 = 1 << 20;

fn options() -> Options {
    let swap_in = Some(SwapIn { layers: Layers::All, tokens: 256 });
    Options { tokens: 512, window: Some(128), swap_in, ..Options::default() }
}

fn converted() -> Converted {
    convert(FIXTURE.as_ref(), &["--bits", "4"])
}

/// What was stated.
#[derive(Default)]
struct Stated(Mutex<Vec<DeviceMemory>>);

impl Observer for Stated {
    fn event(&self, event: &Event<'_>) {
        if let Event::Memory(memory) = event {
            self.0.lock().unwrap().push((*memory).clone());
        }
    }
}

fn on<O: Operations>(converted: &Path, options: &Options, devices: &[O]) -> (Validation, Vec<DeviceMemory>) {
    let stated = Stated::default();
    let validation =
        validate_on(&open(FIXTURE.as_ref()), &open(converted), options, devices, &stated).unwrap();
    (validation, stated.0.into_inner().unwrap())
}

/// All that is measured, to the last digit. The outputs of linears are summed up chunk by chunk, so that the
/// smallest digits of the sums in fp64 are those of the chunks: they are left to [`same_outputs`].
fn figures(validation: &Validation) -> String {
    let Validation { model, cumulative, verdict, .. } = validation;
    let alone: Vec<_> = validation.layers.iter().map(|layer| (&layer.source, layer.swap_in)).collect();
    serde_json::to_string(&(model, alone, cumulative, verdict)).unwrap()
}

fn same_outputs(a: &Validation, b: &Validation) -> bool {
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs();
    a.layers.iter().zip(&b.layers).all(|(a, b)| {
        let (a, b) = (a.output.unwrap(), b.output.unwrap());
        a.rows == b.rows
            && a.max_error == b.max_error
            && near(a.relative_error, b.relative_error)
            && near(a.cosine, b.cosine)
    })
}

fn memory_warnings(validation: &Validation) -> Vec<&str> {
    let of_memory = validation.warnings.iter().filter(|w| w.code == WarningCode::DeviceMemory);
    of_memory.map(|warning| warning.message.as_str()).collect()
}

#[test]
fn any_amount_of_memory_gives_the_same_figures() {
    let converted = converted();
    let (on_cpu, stated) = on(&converted.out, &options(), &[Cpu::new(1)]);
    assert_eq!((stated.len(), stated[0].free), (1, None));
    let wanted = figures(&on_cpu);
    let (mut resident, mut spilled, mut replaced) = (0, 0, 0);
    for memory in [2 << 30, 64 * MIB, 12 * MIB, 3 * MIB, MIB / 8] {
        let device = [Pretended::new(memory)];
        let (found, stated) = on(&converted.out, &options(), &device);
        assert_eq!(figures(&found), wanted, "{memory}: {stated:?}");
        assert!(same_outputs(&found, &on_cpu), "{memory}");
        let stated = &stated[0];
        assert_eq!(stated.free, Some(memory as u64));
        resident += usize::from(stated.resident);
        spilled += usize::from(stated.states_on_device < stated.states && memory_warnings(&found).is_empty());
        replaced += usize::from(memory_warnings(&found).iter().any(|w| w.contains("The CPU does the rest")));
        if memory == 2 << 30 {
            assert!(stated.resident && stated.states_on_device == stated.states, "{stated:?}");
            assert!(memory_warnings(&found).is_empty());
        }
        // All that was taken was given back.
        assert_eq!(device[0].free_memory().unwrap(), Some(memory as u64));
    }
    assert!(resident >= 2 && spilled >= 1 && replaced >= 1, "{resident} {spilled} {replaced}");
}

#[test]
fn weights_that_stay_are_brought_once_for_any_number_of_passes() {
    let converted = converted();
    let weights = |memory, budget| {
        let device = [Pretended::new(memory)];
        let (validation, _) = on(&converted.out, &Options { memory: budget, ..options() }, &device);
        (device[0].weights.load(Ordering::Relaxed), figures(&validation))
    };
    // Embedding, head, and seven linears a block, of both models.
    let (once, wanted) = weights(2 << 30, 0);
    assert_eq!(once, 2 * (2 + 3 * 7));
    // Without the room, each pass brings what it needs.
    let (streamed, found) = weights(3 * MIB, 0);
    assert!(streamed > 3 * once, "{streamed}");
    assert_eq!(found, wanted);
}

#[test]
fn any_number_of_devices_gives_the_figures_of_one() {
    let converted = converted();
    let devices = |count| (0..count).map(|_| Pretended::new(64 * MIB)).collect::<Vec<_>>();
    let (one, _) = on(&converted.out, &options(), &devices(1));
    for count in [2, 3, 40] {
        let devices = devices(count);
        let (several, stated) = on(&converted.out, &options(), &devices);
        assert_eq!(figures(&several), figures(&one), "{count}");
        assert_eq!((several.conditions.device, stated.len()), (format!("{count} × pretended"), count));
        let worked = devices.iter().filter(|device| device.weights.load(Ordering::Relaxed) > 0);
        // More devices than variants: some have nothing to do.
        assert_eq!(worked.count(), count.min(24), "{count}");
    }
    let (source, out) = (open(FIXTURE.as_ref()), open(&converted.out));
    let error = validate_on::<Cpu>(&source, &out, &options(), &[], &Silent).unwrap_err();
    assert_eq!(error.code(), "validate.no_devices");
}

#[test]
fn memory_that_runs_out_on_the_way_costs_time_and_nothing_else() {
    let converted = converted();
    let (whole, _) = on(&converted.out, &options(), &[Pretended::new(64 * MIB)]);
    // At the first upload, in the models, and in the layers alone; once, and for good.
    for at in [0, 30, 70] {
        for refused in [at..at + 1, at..usize::MAX] {
            let mut device = Pretended::new(64 * MIB);
            device.refused = refused.clone();
            // All states on the device leave nothing to upload after the models are there.
            let (found, _) = on(&converted.out, &Options { memory: 1 << 20, ..options() }, &[device]);
            assert_eq!(figures(&found), figures(&whole), "{refused:?}");
            let warnings = memory_warnings(&found);
            let for_good = refused.end == usize::MAX;
            if at < 70 {
                assert_eq!(warnings.len(), 1, "{refused:?}");
                assert!(warnings[0].contains("pretended: upload"), "{}", warnings[0]);
                assert_eq!(warnings[0].contains("The CPU does the rest"), for_good, "{}", warnings[0]);
            }
        }
    }
    // One of two.
    let mut short = Pretended::new(64 * MIB);
    short.refused = 5..usize::MAX;
    let (found, _) = on(&converted.out, &options(), &[Pretended::new(64 * MIB), short]);
    assert_eq!((figures(&found), memory_warnings(&found).len()), (figures(&whole), 1));
}

#[test]
fn a_device_that_dies_is_the_error_whatever_the_others_do() {
    let converted = converted();
    let (source, out) = (open(FIXTURE.as_ref()), open(&converted.out));
    let mut dying = Pretended::new(64 * MIB);
    dying.dies_at = 9;
    let devices = [Pretended::new(64 * MIB), dying, Pretended::new(64 * MIB)];
    let error = validate_on(&source, &out, &options(), &devices, &Silent).unwrap_err();
    assert_eq!((error.code(), error.to_string().contains("it died")), ("validate.device", true));
    let died = requant::validate::Error::from(Error::NotBuilt);
    assert_eq!(died.code(), "validate.device");
}

#[test]
fn without_single_layers_one_device_works() {
    let converted = converted();
    let (source, out) = (open(FIXTURE.as_ref()), open(&converted.out));
    let options = Options { swap_in: None, ..options() };
    let devices = [Pretended::new(64 * MIB), Pretended::new(64 * MIB)];
    let (found, _) = on(&converted.out, &options, &devices);
    assert_eq!(devices[1].weights.load(Ordering::Relaxed), 0);
    let wanted = validate(&source, &out, &options, &Cpu::new(1), &Silent).unwrap();
    assert_eq!(figures(&found), figures(&wanted));
}
