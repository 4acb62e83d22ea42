//! The work on any number of devices: each has its share of the variants, and what a device has no room for is
//! done in smaller pieces, at last on the CPU.

use super::Error;
use super::forward::{self, Found, Models, Worker};
use super::report::SwapScores;
use super::scores::Tally;
use super::swap::{Pass, Schedule};
use super::text::Windows;
use super::variant::Variant;
use crate::progress::{Event, Observer};
use crate::warning::{Warning, WarningCode};
use requant_kernels::{Cpu, Operations};
use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// A device, and the CPU in its place when its memory has run out.
pub(super) struct Device<'a, O: Operations> {
    worker: Worker<'a, O>,
    windows: &'a Windows,
    memory: u64,
    spare: &'a Spare,
    /// Whether the CPU does the rest.
    replaced: bool,
    pub(super) warnings: Vec<Warning>,
}

/// The CPU, if a device's memory runs out.
pub(super) struct Spare {
    threads: usize,
    cpu: OnceLock<Cpu>,
}

impl Spare {
    /// With the threads of the caller's pool.
    pub(super) fn new() -> Self {
        Self { threads: rayon::current_num_threads(), cpu: OnceLock::new() }
    }

    fn cpu(&self) -> &Cpu {
        self.cpu.get_or_init(|| Cpu::new(self.threads))
    }
}

/// Work that any device can do.
trait Task {
    type Output;
    fn run<O: Operations>(&self, worker: &mut Worker<'_, O>) -> Result<Self::Output, crate::Error>;
}

impl<'a, O: Operations> Device<'a, O> {
    /// `memory` is the limit for hidden states in the host's memory.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn new(
        ops: &'a O,
        spare: &'a Spare,
        models: &'a Models<'a>,
        windows: &'a Windows,
        memory: u64,
    ) -> Result<Self, crate::Error> {
        let worker = Worker::new(ops, models, windows, memory)?;
        Ok(Self { worker, windows, memory, spare, replaced: false, warnings: Vec::new() })
    }

    /// Says what the device's memory will hold, with so many variants.
    pub(super) fn state_memory(&self, variants: usize, tokens: usize, observer: &dyn Observer) {
        let of_token = 4 * self.worker.models.source.hidden() as u64;
        let states = of_token * (2 * self.windows.tokens.len()).max((variants + 2) * tokens) as u64;
        let stated = self.worker.room.stated(self.worker.ops.name(), states);
        observer.event(&Event::Memory(&stated));
    }

    /// Both models over the text.
    ///
    /// # Errors
    /// Those of [`forward::run`], but lack of memory.
    pub(super) fn forward(&mut self, observer: &dyn Observer) -> Result<Found, crate::Error> {
        struct Forward<'a>(&'a Windows, &'a dyn Observer);
        impl Task for Forward<'_> {
            type Output = Found;
            fn run<O: Operations>(&self, worker: &mut Worker<'_, O>) -> Result<Found, crate::Error> {
                forward::run(worker, self.0, self.1)
            }
        }
        self.run(&Forward(self.windows, observer))
    }

    fn pass(
        &mut self,
        pass: &Pass<'_>,
        observer: &dyn Observer,
    ) -> Result<BTreeMap<usize, Tally>, crate::Error> {
        struct OfPass<'a>(&'a Pass<'a>, &'a dyn Observer);
        impl Task for OfPass<'_> {
            type Output = BTreeMap<usize, Tally>;
            fn run<O: Operations>(&self, worker: &mut Worker<'_, O>) -> Result<Self::Output, crate::Error> {
                worker.pass(self.0, self.1)
            }
        }
        self.run(&OfPass(pass, observer))
    }

    /// Does work with less and less of the device's memory until it is done, at last without any.
    fn run<T: Task>(&mut self, task: &T) -> Result<T::Output, crate::Error> {
        while !self.replaced {
            match task.run(&mut self.worker) {
                Err(error) if is_lack_of_memory(&error) => {
                    let smaller = self.worker.shrink();
                    self.warn(&error, smaller);
                    self.replaced = !smaller;
                }
                result => return result,
            }
        }
        let mut worker = Worker::new(self.spare.cpu(), self.worker.models, self.windows, self.memory)?;
        task.run(&mut worker)
    }

    /// One warning a device: the last counts.
    fn warn(&mut self, error: &crate::Error, smaller: bool) {
        let done = match smaller {
            true => "Its weights are loaded block by block, and pieces are smaller: it takes longer",
            false => "The CPU does the rest: it takes longer, and its last digits are its own",
        };
        let message = format!("{error}. {done}; what was done before is kept.");
        let code = WarningCode::DeviceMemory;
        self.warnings = vec![Warning { code, subject: self.worker.ops.name(), message }];
    }
}

fn is_lack_of_memory(error: &crate::Error) -> bool {
    matches!(error, crate::Error::Validate(Error::Device(requant_kernels::Error::OutOfMemory { .. })))
}

/// Devices in words, each kind once.
pub(super) fn in_words<O: Operations>(devices: &[O]) -> String {
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    devices.iter().for_each(|ops| *kinds.entry(ops.name()).or_default() += 1);
    let word = |(name, count): (String, usize)| if count == 1 { name } else { format!("{count} × {name}") };
    kinds.into_iter().map(word).collect::<Vec<_>>().join(", ")
}

/// How the variants are shared and cut up.
pub(super) struct Shares {
    /// Of each device.
    shares: Vec<Vec<usize>>,
    schedules: Vec<Schedule>,
    tokens: usize,
}

impl Shares {
    /// Every device takes each so many-th variant, so that all have early and late ones.
    pub(super) fn new<O: Operations>(
        devices: &[Device<'_, O>],
        variants: usize,
        windows: &Windows,
        tokens: usize,
    ) -> Self {
        let count = tokens.div_ceil(windows.window);
        let mut shares = Vec::with_capacity(devices.len());
        let mut schedules = Vec::with_capacity(devices.len());
        for (i, device) in devices.iter().enumerate() {
            let share: Vec<usize> = (i..variants).step_by(devices.len()).collect();
            let bytes = (windows.window * device.worker.models.source.hidden() * 4) as u64;
            // The host's memory is shared, and a device's own is not.
            schedules.push(Schedule::new(share.len(), count, bytes, device.worker.room.of_pass()));
            shares.push(share);
        }
        Self { shares, schedules, tokens }
    }

    /// How long it will take, by what a token took before.
    pub(super) fn estimate(&self, variants: &[Variant], layers: usize, found: &Found) -> std::time::Duration {
        let time = |(share, schedule): (&Vec<usize>, &Schedule)| {
            let own: Vec<Variant> = share.iter().map(|&v| variants[v].clone()).collect();
            schedule.estimate(&own, layers, self.tokens, found.block_time, found.head_time)
        };
        self.shares.iter().zip(&self.schedules).map(time).max().unwrap_or_default()
    }
}

/// Stops all devices when one has failed.
struct Together<'a> {
    observer: &'a dyn Observer,
    failed: AtomicBool,
}

impl Observer for Together<'_> {
    fn event(&self, event: &Event<'_>) {
        self.observer.event(event);
    }

    fn cancelled(&self) -> bool {
        self.failed.load(Ordering::Relaxed) || self.observer.cancelled()
    }
}

/// Each variant's scores, in their order: each device does its share in a thread of its own.
///
/// # Errors
/// Those of reading weights and of the devices, but lack of memory; [`crate::Error::Cancelled`].
pub(super) fn swap_in<O: Operations>(
    devices: &mut [Device<'_, O>],
    windows: &Windows,
    tokens: &[u32],
    variants: &[Variant],
    shares: &Shares,
    observer: &dyn Observer,
) -> Result<Vec<SwapScores>, crate::Error> {
    let count = tokens.len().div_ceil(windows.window);
    let each = shares.shares.iter().zip(&shares.schedules);
    let passes: usize = each.map(|(share, schedule)| schedule.passes(share.len(), count)).sum();
    let Some(layers) = devices.first().map(|device| device.worker.models.source.layers()) else {
        return Ok(Vec::new());
    };
    observer.event(&Event::Stage { name: "swap-in", modules: passes * (layers + 1), weights: 0 });
    let together = Together { observer, failed: AtomicBool::new(false) };
    let work = |device: &mut Device<'_, O>, share: &[usize], schedule: &Schedule| {
        let mut tallies: Vec<(usize, Tally)> = share.iter().map(|&v| (v, Tally::default())).collect();
        for pass in Pass::all(windows, tokens, variants, share, schedule) {
            let mut found = device.pass(&pass, &together).inspect_err(|_| {
                together.failed.store(true, Ordering::Relaxed);
            })?;
            for (variant, tally) in &mut tallies {
                if let Some(more) = found.remove(variant) {
                    tally.append(more);
                }
            }
        }
        Ok::<_, crate::Error>(tallies)
    };
    let work = &work;
    if let ([device], [share], [schedule]) = (&mut *devices, &*shares.shares, &*shares.schedules) {
        return Ok(work(device, share, schedule)?.iter().map(|(_, tally)| tally.variant()).collect());
    }
    let results: Vec<Result<Vec<(usize, Tally)>, crate::Error>> = std::thread::scope(|scope| {
        let of_each = devices.iter_mut().zip(&shares.shares).zip(&shares.schedules);
        let threads: Vec<_> = of_each
            .map(|((device, share), schedule)| scope.spawn(move || work(device, share, schedule)))
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    });
    // What failed is the cause; the others were only stopped.
    let (done, mut failed): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    failed.sort_by_key(|result| matches!(result, Err(crate::Error::Cancelled)));
    if let Some(Err(error)) = failed.into_iter().next() {
        return Err(error);
    }
    let mut tallies: Vec<(usize, Tally)> = done.into_iter().flatten().flatten().collect();
    tallies.sort_by_key(|(variant, _)| *variant);
    Ok(tallies.iter().map(|(_, tally)| tally.variant()).collect())
}
