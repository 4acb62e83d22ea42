//! The command line: one file a command.
//!
//! Takes arguments, calls the library, prints results on stdout and everything else on stderr. Must not hold
//! logic that a library user would miss.

mod calibration;
mod convert;
mod convert_run;
mod device;
#[cfg(feature = "cuda")]
mod doctor;
mod errors;
mod inspect;
mod print;
mod progress;
mod size;
mod summary;
mod validate;
mod validate_summary;
mod verify;

use clap::{CommandFactory, Parser, Subcommand};
use errors::Failure;
use std::process::ExitCode;

/// Convert quantized checkpoints between GPTQ and EXL2, and see what that did.
#[derive(Debug, Parser)]
#[command(name = "requant", version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Threads to use; all cores if left out.
    #[arg(long, global = true, display_order = 100, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Print results and errors as JSON.
    #[arg(long, global = true, display_order = 101)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    Inspect(inspect::Arguments),
    Convert(Box<convert::Arguments>),
    Verify(verify::Arguments),
    Validate(Box<validate::Arguments>),
    #[cfg(feature = "cuda")]
    Doctor(doctor::Arguments),
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Write man pages into a directory.
    #[command(hide = true)]
    Man {
        /// The directory, which must exist.
        dir: std::path::PathBuf,
    },
}

/// Runs the program.
pub(crate) fn run() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        // Help and the version, too, come as errors, but for stdout.
        Err(e) if e.use_stderr() && std::env::args_os().any(|argument| argument == "--json") => {
            return Failure::arguments(&e).report(true);
        }
        Err(e) => e.exit(),
    };
    match execute(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(arguments.json),
    }
}

fn execute(arguments: &Arguments) -> Result<(), Failure> {
    let mut pool = rayon::ThreadPoolBuilder::new();
    if let Some(threads) = arguments.threads {
        pool = pool.num_threads(usize::from(threads));
    }
    let pool = pool.build().map_err(|e| Failure::environment(format!("threads can't be started: {e}")))?;
    match &arguments.command {
        Command::Inspect(inspect) => pool.install(|| inspect.run(arguments.json)),
        Command::Convert(convert) => pool.install(|| convert.run(arguments.json)),
        Command::Verify(verify) => pool.install(|| verify.run(arguments.json)),
        Command::Validate(validate) => pool.install(|| validate.run(arguments.json)),
        #[cfg(feature = "cuda")]
        Command::Doctor(doctor) => pool.install(|| doctor.run(arguments.json)),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Arguments::command(), "requant", &mut script);
            print::stdout(&String::from_utf8_lossy(&script))
        }
        Command::Man { dir } => clap_mangen::generate_to(Arguments::command(), dir)
            .map_err(|e| Failure::environment(format!("{}: {e}", dir.display()))),
    }
}
