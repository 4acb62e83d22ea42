//! The `requant` binary: parse, call the library, print, exit code.

mod cli;

fn main() -> std::process::ExitCode {
    cli::run()
}
