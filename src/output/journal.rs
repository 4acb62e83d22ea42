//! A file of lines that only grows.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use super::{Action, Error};

/// Lines that say what is done. One that a killed process left unfinished is cut off when it is opened again.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens or creates it, and gives its lines without their ends.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(path: &Path) -> Result<(Self, Vec<Vec<u8>>), Error> {
        let mut file = File::options()
            .read(true)
            .append(true)
            .create(true)
            .open(path)
            .map_err(Action::Create.failed(path))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(Action::Read.failed(path))?;
        let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        if whole < bytes.len() {
            file.set_len(whole as u64).map_err(Action::Write.failed(path))?;
        }
        let lines = bytes[..whole].split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        Ok((Journal { path: path.to_owned(), file }, lines.map(<[u8]>::to_vec).collect()))
    }

    /// Adds a line. It survives the death of the process at once, a power cut only after [`sync`](Self::sync).
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn append(&mut self, line: &[u8]) -> Result<(), Error> {
        // One call, so that a kill leaves no more than the last line torn.
        let line = [line, b"\n"].concat();
        self.file.write_all(&line).map_err(Action::Write.failed(&self.path))
    }

    /// Brings it to the disk.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync(&self) -> Result<(), Error> {
        self.file.sync_data().map_err(Action::Sync.failed(&self.path))
    }
}
