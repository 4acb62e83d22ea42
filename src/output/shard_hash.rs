//! The sha256 of a file that is still being written.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use sha2::{Digest, Sha256};

/// Bytes hashed between two looks at whether to go on.
pub(super) const HASH_CHUNK: usize = 1 << 20;

/// The hash of a file's first bytes. A sha256 takes bytes only in the order of the file, so it goes as far as
/// the file is written without gaps, and on from there later.
#[derive(Debug, Default)]
pub(super) struct FileHash {
    hasher: Sha256,
    /// Bytes that it holds.
    hashed: u64,
    /// Tensors that it holds.
    pub(super) tensors: usize,
}

impl FileHash {
    /// Goes on to the byte `end`, or until `stop`: gives whether it got there.
    ///
    /// # Errors
    /// Those of reading; [`io::ErrorKind::UnexpectedEof`] if the file is shorter.
    pub(super) fn advance(&mut self, file: &File, end: u64, stop: &dyn Fn() -> bool) -> io::Result<bool> {
        let mut chunk = vec![0; HASH_CHUNK.min(end.saturating_sub(self.hashed) as usize)];
        while self.hashed < end {
            if stop() {
                return Ok(false);
            }
            let chunk = &mut chunk[..HASH_CHUNK.min((end - self.hashed) as usize)];
            file.read_exact_at(chunk, self.hashed)?;
            self.hasher.update(&*chunk);
            self.hashed += chunk.len() as u64;
        }
        Ok(true)
    }

    /// The hash of all so far, in lower-case hexadecimal.
    pub(super) fn hexadecimal(&self) -> String {
        self.hasher.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
