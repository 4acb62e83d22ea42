//! Prints the sha256 of every quantized linear as it decodes, as JSON: fp16, little-endian,
//! `[in_features, out_features]` row-major. Other decoders can be compared with it bit for bit.
//!
//! ```sh
//! cargo run --release --example decode_hashes -- out/tiny-llama-exl2
//! ```
#![allow(clippy::print_stdout)]

use requant::checkpoint::{Checkpoint, OpenOptions};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

fn main() -> anyhow::Result<()> {
    let mut models = BTreeMap::new();
    for dir in std::env::args().skip(1) {
        let checkpoint = Checkpoint::open(dir.as_ref(), &OpenOptions::default())?;
        let mut hashes = BTreeMap::new();
        for module in checkpoint.modules().iter().filter(|m| m.layout().is_quantized()) {
            // Columns that only pad are part of what a kernel decodes.
            let weights = match module.layout() {
                requant::checkpoint::Layout::Exl2(_) => checkpoint.exl2(module)?.dequantize(),
                _ => checkpoint.dequantize(module)?,
            };
            let hash = Sha256::digest(bytemuck::cast_slice::<_, u8>(&weights));
            let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
            hashes.insert(module.name().to_string(), hex);
        }
        let name = dir.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_string();
        models.insert(name, hashes);
    }
    println!("{}", serde_json::to_string_pretty(&models)?);
    Ok(())
}
