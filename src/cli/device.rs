//! `--device`: where a command computes.

use super::print;
use requant::kernels::{Cpu, Error};
use std::fmt;
use std::str::FromStr;

/// Where to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Device {
    /// All GPUs that can be used, or the processor where none can.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// All GPUs that can be used.
    AllCuda,
    /// This GPU, counted from 0.
    Cuda(usize),
}

/// A word that names no device.
#[derive(Debug, thiserror::Error)]
#[error("`auto`, `cpu`, `cuda`, or `cuda:N` for the GPU of this number")]
pub(super) struct NoDevice;

impl FromStr for Device {
    type Err = NoDevice;

    fn from_str(text: &str) -> Result<Self, NoDevice> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::AllCuda),
            _ => {
                let number = text.strip_prefix("cuda:").ok_or(NoDevice)?;
                // A number has no sign here, which `parse` would take.
                let digits = number.bytes().all(|byte| byte.is_ascii_digit());
                number.parse().ok().filter(|_| digits).map(Self::Cuda).ok_or(NoDevice)
            }
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::AllCuda => f.write_str("cuda"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// Devices that are ready.
pub(super) enum Opened {
    /// All threads of the pool.
    Cpu(Cpu),
    /// One at least.
    #[cfg(feature = "cuda")]
    Cuda(Vec<requant::kernels::cuda::Cuda>),
}

impl Device {
    /// Opens it. GPUs that are there and can't be used are told of in a line on stderr, where others can or under
    /// `auto`.
    pub(super) fn open(self) -> Result<Opened, Error> {
        match self {
            Self::Cpu => Ok(processor()),
            Self::Cuda(ordinal) => gpu(ordinal),
            Self::AllCuda => gpus(),
            Self::Auto => Ok(gpus().unwrap_or_else(|error| {
                if worth_telling(&error) {
                    print::stderr(&format!("note: this runs on the CPU: {error}"));
                }
                processor()
            })),
        }
    }
}

fn processor() -> Opened {
    Opened::Cpu(Cpu::new(rayon::current_num_threads()))
}

#[cfg(feature = "cuda")]
fn gpu(ordinal: usize) -> Result<Opened, Error> {
    use requant::kernels::cuda::{Cuda, Setup};
    Ok(Opened::Cuda(vec![Cuda::new(ordinal, &Setup::from_environment())?]))
}

/// All that can be used; why the first can't, where none can.
#[cfg(feature = "cuda")]
fn gpus() -> Result<Opened, Error> {
    use requant::kernels::cuda::{Cuda, Setup, device_count};
    let setup = Setup::from_environment();
    let mut opened = Vec::new();
    let mut refused = Vec::new();
    for ordinal in 0..device_count()? {
        match Cuda::new(ordinal, &setup) {
            Ok(gpu) => opened.push(gpu),
            Err(unavailable) => refused.push((ordinal, unavailable)),
        }
    }
    match (opened.is_empty(), refused.first()) {
        (true, Some((_, unavailable))) => return Err(unavailable.clone().into()),
        (true, None) => return Err(requant::kernels::cuda::Unavailable::NoDevice.into()),
        _ => {}
    }
    for (ordinal, unavailable) in refused {
        print::stderr(&format!("note: cuda:{ordinal} is left out: {unavailable}"));
    }
    Ok(Opened::Cuda(opened))
}

#[cfg(not(feature = "cuda"))]
fn gpu(_ordinal: usize) -> Result<Opened, Error> {
    Err(Error::NotBuilt)
}

#[cfg(not(feature = "cuda"))]
fn gpus() -> Result<Opened, Error> {
    Err(Error::NotBuilt)
}

/// A machine without a GPU needs no word about it.
fn worth_telling(error: &Error) -> bool {
    match error {
        Error::NotBuilt => false,
        #[cfg(feature = "cuda")]
        Error::Unavailable(unavailable) => {
            use requant::kernels::cuda::Unavailable::{NoDevice, NoDriver};
            !matches!(unavailable, NoDriver | NoDevice)
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::Device;

    #[test]
    fn devices_are_read_as_they_are_shown() {
        for device in [Device::Auto, Device::Cpu, Device::AllCuda, Device::Cuda(0), Device::Cuda(12)] {
            assert_eq!(device.to_string().parse::<Device>().ok(), Some(device));
        }
        for wrong in ["", "gpu", "CUDA", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda0", "cpu:0", "cuda: 1"]
        {
            assert!(wrong.parse::<Device>().is_err(), "{wrong:?}");
        }
    }
}
