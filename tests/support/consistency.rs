//! Compares what a conversion says of its output with the files themselves.

use super::binary::{Converted, files_in};
use requant::checkpoint::Checkpoint;
use safetensors::SafeTensors;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Bytes and dtype of every tensor in the shards, by name.
fn tensors(out: &Path) -> BTreeMap<String, (usize, Vec<usize>)> {
    let mut tensors = BTreeMap::new();
    for (name, bytes) in files_in(out).into_iter().filter(|(name, _)| name.ends_with(".safetensors")) {
        for (tensor, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let old = tensors.insert(tensor.clone(), (view.data().len(), view.shape().to_vec()));
            assert_eq!(old, None, "{tensor} stands twice, in {name} too");
        }
    }
    tensors
}

/// Names that a JSON array of objects gives under a key.
pub(crate) fn names(list: &Value, key: &str) -> Vec<String> {
    list.as_array().unwrap().iter().map(|entry| entry[key].as_str().unwrap().to_owned()).collect()
}

impl Converted {
    /// Checks what the report, the index and the configuration say of the files against the files.
    pub(crate) fn assert_consistent(&self, source: &Checkpoint) {
        let Converted { out, report, .. } = self;
        let (stored, files) = (tensors(out), files_in(out));

        // The index has every tensor in its shard, and the sum of their bytes.
        let index: Value = serde_json::from_slice(&files["model.safetensors.index.json"]).unwrap();
        let map = index["weight_map"].as_object().unwrap();
        assert!(map.keys().eq(stored.keys()));
        for (tensor, shard) in map {
            let shard = &files[shard.as_str().unwrap()];
            SafeTensors::deserialize(shard).unwrap().tensor(tensor).unwrap();
        }
        let bytes: usize = stored.values().map(|(bytes, _)| bytes).sum();
        assert_eq!(index["metadata"]["total_size"], bytes);
        assert_eq!(report["totals"]["tensor_bytes"], bytes);

        // Every tensor has an origin, and every origin exists.
        let origins = report["tensors"].as_array().unwrap();
        let origin_names: BTreeSet<String> = names(&report["tensors"], "name").into_iter().collect();
        assert_eq!(origins.len(), origin_names.len());
        assert!(origin_names.iter().eq(stored.keys()));
        for origin in origins {
            let sources = origin["sources"].as_array().unwrap();
            assert!(!sources.is_empty(), "{origin}");
            for tensor in sources {
                assert!(source.tensor(tensor.as_str().unwrap()).is_some(), "{origin}");
            }
            let name = origin["name"].as_str().unwrap();
            let (to, from) =
                (self.checkpoint.tensor(name).unwrap(), source.tensor(sources[0].as_str().unwrap()).unwrap());
            match origin["exactness"].as_str().unwrap() {
                "identical" => assert!(to.bytes() == from.bytes(), "{origin}"),
                // The same values in another type, or decoded from codes, which the errors show.
                "exact" => assert!(sources.len() > 1 || to.floats() == from.floats(), "{origin}"),
                "rounded" => assert!(to.floats() != from.floats(), "{origin}"),
                other => assert_eq!(other, "requantized", "{origin}"),
            }
        }

        // The shards are the files, and hash to what the report says.
        let shards = report["shards"].as_array().unwrap();
        let of_weights = files.keys().filter(|name| name.ends_with(".safetensors"));
        assert!(of_weights.eq(names(&report["shards"], "file").iter()));
        for shard in shards {
            let bytes = &files[shard["file"].as_str().unwrap()];
            assert_eq!(shard["bytes"], bytes.len());
            let sha256: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(shard["sha256"], sha256);
        }

        // bpw by the files: bits of the decoder's linears that have a q_weight, over k · n.
        let dense_weights = |name: &str| stored[name].1.iter().product::<usize>() as u64;
        let (mut bits, mut weights, mut all_weights) = (0, 0, 0);
        for module in self.checkpoint.modules() {
            let prefix = format!("{}.", module.name());
            let own = || stored.iter().filter(|(name, _)| name.starts_with(&prefix));
            let own_bits: u64 = own().map(|(_, (bytes, _))| 8 * *bytes as u64).sum();
            if stored.contains_key(&format!("{prefix}q_weight")) {
                all_weights += module.weights();
                if module.name() != "lm_head" {
                    bits += own_bits;
                    weights += module.weights();
                }
            } else {
                all_weights += dense_weights(&format!("{prefix}weight"));
            }
            let bias = format!("{prefix}bias");
            all_weights += if stored.contains_key(&bias) { dense_weights(&bias) } else { 0 };
            assert_eq!(self.module(module.name())["stored_bits"], own_bits, "{prefix}");
        }
        all_weights += self.checkpoint.other_tensors().map(|t| t.elements() as u64).sum::<u64>();
        let totals = &report["totals"];
        assert_eq!(totals["quantized_weights"], weights);
        assert_eq!(totals["stored_bits"], bits);
        assert_eq!(totals["bpw"], bits as f64 / weights as f64);
        assert_eq!(totals["all_weights"], all_weights);
        assert_eq!(totals["file_bpw"], 8.0 * bytes as f64 / all_weights as f64);
        let config_bits = self.config["quantization_config"]["bits"].as_f64().unwrap();
        assert!((config_bits - bits as f64 / weights as f64).abs() <= 0.5e-4);
    }
}
