//! Progress on stderr: a bar on a terminal, plain lines otherwise, JSON lines for pipelines. And Ctrl-C.

use super::print;
use indicatif::{ProgressBar, ProgressStyle};
use requant::progress::{CancelFlag, DeviceMemory, Event, Observer};
use std::io::IsTerminal;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How progress is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Style {
    /// A bar on a terminal, plain lines otherwise.
    #[default]
    Auto,
    /// A line now and then.
    Plain,
    /// A JSON object a line.
    Json,
    /// Nothing.
    None,
}

/// The stage whose "modules" are files, and which counts no weights.
const WRITE: &str = "write";

/// Time between two plain lines.
const PAUSE: Duration = Duration::from_secs(5);

/// Shows progress, and cancels when the user presses Ctrl-C.
pub(super) struct Progress {
    style: Style,
    bar: ProgressBar,
    cancel: Arc<CancelFlag>,
    state: Mutex<State>,
}

struct State {
    stage: &'static str,
    modules: usize,
    weights: u64,
    modules_done: usize,
    weights_done: u64,
    started: Instant,
    last_line: Instant,
}

impl Progress {
    pub(super) fn new(style: Style) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let style = if style == Style::Auto && !terminal { Style::Plain } else { style };
        let bar = if style == Style::Auto { ProgressBar::new(0) } else { ProgressBar::hidden() };
        let template = "{prefix:8} [{bar:30}] {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        let cancel = Arc::new(CancelFlag::default());
        let flag = Arc::clone(&cancel);
        // Fails only where a handler is set already, and this is the one place that sets one.
        let _ = ctrlc::set_handler(move || {
            if flag.is_set() {
                // Asked twice: the user doesn't want to wait for the module in work.
                #[allow(clippy::exit)]
                std::process::exit(130);
            }
            print::stderr("stopping after the module in work (press Ctrl-C again to stop at once)");
            flag.cancel();
        });
        let now = Instant::now();
        let (modules, weights, modules_done, weights_done) = (0, 0, 0, 0);
        let state = Mutex::new(State {
            stage: "",
            modules,
            weights,
            modules_done,
            weights_done,
            started: now,
            last_line: now,
        });
        Self { style, bar, cancel, state }
    }

    /// Tells how much memory the work to come takes at most.
    pub(super) fn memory(&self, bytes: u64) {
        match self.style {
            Style::None => {}
            Style::Json => print::stderr(&serde_json::json!({ "peak_memory": bytes }).to_string()),
            _ => {
                self.bar.suspend(|| print::stderr(&format!("takes up to {} of memory", print::memory(bytes))))
            }
        }
    }

    /// Takes the bar away, so that what follows stands on a line of its own.
    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl State {
    fn rate(&self) -> f64 {
        self.weights_done as f64 / self.started.elapsed().as_secs_f64().max(1e-3)
    }

    fn seconds_left(&self) -> Option<u64> {
        let rate = self.rate();
        (rate > 0.0 && self.modules_done < self.modules)
            .then(|| ((self.weights - self.weights_done.min(self.weights)) as f64 / rate).ceil() as u64)
    }

    fn line(&self) -> String {
        let left = self.seconds_left().map_or(String::new(), |s| format!(", {} left", duration(s)));
        if self.stage == WRITE {
            return format!("{}/{} files", self.modules_done, self.modules);
        }
        if self.counts_blocks() {
            return format!("{}/{} blocks", self.modules_done, self.modules);
        }
        let rate = print::count(self.rate() as u64);
        format!("{}/{} modules, {rate} weights/s{left}", self.modules_done, self.modules)
    }

    /// Whether what is counted are blocks of a model, and no weights.
    fn counts_blocks(&self) -> bool {
        matches!(self.stage, "forward" | "swap-in")
    }

    /// What is to come.
    fn announcement(&self) -> String {
        match (self.stage, self.modules) {
            (WRITE, 1) => "1 file".into(),
            (WRITE, files) => format!("{files} files"),
            (_, blocks) if self.counts_blocks() => format!("{blocks} blocks"),
            (_, modules) => format!("{modules} modules, {} weights", print::count(self.weights)),
        }
    }
}

fn duration(seconds: u64) -> String {
    match seconds {
        s if s < 60 => format!("{s} s"),
        s if s < 3600 => format!("{} min {} s", s / 60, s % 60),
        s => format!("{} h {} min", s / 3600, s % 3600 / 60),
    }
}

fn in_words(memory: &DeviceMemory, free: u64) -> String {
    let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30));
    let weights = match memory.resident {
        true => "all weights",
        false => "weights, block by block",
    };
    let elsewhere = memory.states - memory.states_on_device;
    let states = match elsewhere {
        0 => String::new(),
        bytes => format!(" ({} of them in the host's memory, or in another pass)", gib(bytes)),
    };
    format!(
        "{}: {} free; {} for {weights}, {} to work with, {} for hidden states{states}",
        memory.device,
        gib(free),
        gib(memory.weights),
        gib(memory.work),
        gib(memory.states),
    )
}

impl Observer for Progress {
    fn event(&self, event: &Event<'_>) {
        // A panic elsewhere is what matters then.
        let Ok(mut state) = self.state.lock() else { return };
        let state = &mut *state;
        match *event {
            Event::Stage { name, modules, weights } => {
                let now = Instant::now();
                *state = State {
                    stage: name,
                    modules,
                    weights,
                    modules_done: 0,
                    weights_done: 0,
                    started: now,
                    last_line: now,
                };
                self.bar.set_length(weights);
                self.bar.set_position(0);
                self.bar.set_prefix(name);
                if self.style == Style::Plain {
                    print::stderr(&format!("{name}: {}", state.announcement()));
                }
            }
            Event::Module { weights, .. } => {
                state.modules_done += 1;
                state.weights_done += weights;
                let (done, of) = match state.stage {
                    WRITE | "forward" | "swap-in" => (state.modules_done as u64, state.modules as u64),
                    _ => (state.weights_done, state.weights),
                };
                self.bar.set_length(of);
                self.bar.set_position(done);
                self.bar.set_message(state.line());
                let last = state.modules_done == state.modules;
                if self.style == Style::Plain && (last || state.last_line.elapsed() >= PAUSE) {
                    state.last_line = Instant::now();
                    print::stderr(&format!("{}: {}", state.stage, state.line()));
                }
            }
            Event::Estimate { stage, time } => {
                if self.style == Style::Json {
                    let json = serde_json::json!({ "stage": stage, "estimated_seconds": time.as_secs_f64() });
                    print::stderr(&json.to_string());
                } else if self.style != Style::None {
                    let line = format!("{stage} will take about {}", duration(time.as_secs()));
                    self.bar.suspend(|| print::stderr(&line));
                }
                return;
            }
            Event::Memory(memory) => {
                if self.style == Style::Json {
                    let json = serde_json::json!({
                        "device": memory.device, "free_memory": memory.free, "weights": memory.weights,
                        "resident": memory.resident, "work": memory.work, "states": memory.states,
                        "states_on_device": memory.states_on_device,
                    });
                    print::stderr(&json.to_string());
                } else if let (false, Some(free)) = (self.style == Style::None, memory.free) {
                    self.bar.suspend(|| print::stderr(&in_words(memory, free)));
                }
                return;
            }
            _ => {}
        }
        if self.style == Style::Json {
            let json = serde_json::json!({
                "stage": state.stage, "modules": state.modules, "weights": state.weights,
                "modules_done": state.modules_done, "weights_done": state.weights_done,
            });
            print::stderr(&json.to_string());
        }
    }

    fn cancelled(&self) -> bool {
        self.cancel.is_set()
    }
}
