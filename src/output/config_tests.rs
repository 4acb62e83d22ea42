use serde_json::{Map, Value, json};

use super::*;

const FACTS: Exl2Facts = Exl2Facts { bpw: 4.249_961, head_bits: 16, untied: false };

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        other => panic!("{other} is no object"),
    }
}

fn convert(source: Value) -> Config {
    exl2_config(&object(source), &FACTS)
}

/// A Llama configuration with the given keys about rope.
fn with_rope(rope: Value) -> Config {
    let mut source = object(json!({
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "max_position_embeddings": 131072,
    }));
    source.extend(object(rope));
    exl2_config(&source, &FACTS)
}

fn keys(json: &Map<String, Value>) -> Vec<&str> {
    json.keys().map(String::as_str).collect()
}

/// The keys of SmolLM2's configuration as GPTQModel 7.7.0 writes it, shortened.
fn smollm2() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": false,
        "dtype": "bfloat16",
        "head_dim": 64,
        "initializer_range": 0.041666666666666664,
        "max_position_embeddings": 8192,
        "quantization_config": {
            "bits": 4, "checkpoint_format": "gptq", "format": "gptq", "group_size": 64,
            "meta": { "quantizer": ["gptqmodel:7.7.0"] }, "quant_method": "gptq", "sym": true
        },
        "rms_norm_eps": 1e-05,
        "rope_parameters": { "rope_theta": 100000.0, "rope_type": "default" },
        "tie_word_embeddings": true,
        "transformers_version": "5.24.0",
        "vocab_size": 49152
    })
}

#[test]
fn smollm2_gets_its_theta_at_top_level_and_keeps_everything_else() {
    let Config { json, notes } = convert(smollm2());
    assert_eq!(notes, []);
    let mut expected = object(smollm2());
    expected.insert("dtype".into(), json!("float16"));
    expected.insert(
        "quantization_config".into(),
        json!({
            "quant_method": "exl2", "version": "0.3.2", "bits": 4.25, "head_bits": 16,
            "calibration": { "rows": 0, "length": 0, "dataset": "(none)" },
        }),
    );
    expected.insert("rope_theta".into(), json!(100000.0));
    assert_eq!(json, expected);
    let mut order = keys(&json);
    let theta = order.iter().position(|key| *key == "rope_theta").unwrap();
    assert_eq!(order.remove(theta), "rope_theta");
    assert_eq!(order[theta - 1], "rope_parameters");
    assert_eq!(order, keys(&object(smollm2())));
    // The order that exllamav2's own converter writes.
    assert_eq!(
        keys(&object(json["quantization_config"].clone())),
        ["quant_method", "version", "bits", "head_bits", "calibration"]
    );
}

#[test]
fn facts_of_the_conversion() {
    let facts = Exl2Facts { bpw: 3.999_96, head_bits: 6, untied: true };
    let Config { json, .. } = exl2_config(&object(smollm2()), &facts);
    assert_eq!(json["quantization_config"]["bits"], json!(4.0));
    assert_eq!(json["quantization_config"]["head_bits"], json!(6));
    assert_eq!(json["tie_word_embeddings"], json!(false));
    let facts = Exl2Facts { bpw: 2.123_449, ..facts };
    let Config { json, .. } = exl2_config(&object(smollm2()), &facts);
    assert_eq!(json["quantization_config"]["bits"], json!(2.1234));
}

#[test]
fn llama3_scaling_moves_to_top_level() {
    // assets/tiny/tiny-llama3rope
    let parameters = json!({
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 128, "rope_theta": 500000.0, "rope_type": "llama3"
    });
    let Config { json, notes } = with_rope(json!({ "rope_parameters": parameters.clone() }));
    assert_eq!(notes, []);
    assert_eq!(json["rope_parameters"], parameters);
    assert_eq!(json["rope_theta"], json!(500000.0));
    assert_eq!(json["original_max_position_embeddings"], json!(128));
    assert_eq!(
        json["rope_scaling"],
        json!({
            "rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 128
        })
    );
}

#[test]
fn an_old_file_stays_as_it_is() {
    // assets/tiny/tiny-llama-autogptq
    let source = json!({
        "_name_or_path": "tiny-llama",
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": { "bits": 4, "quant_method": "gptq" },
        "rope_scaling": null,
        "rope_theta": 10000.0,
        "torch_dtype": "float16",
        "unknown": { "nested": [1, 2.5, null] },
    });
    let Config { mut json, notes } = convert(source.clone());
    assert_eq!(notes, []);
    assert_eq!(keys(&json), keys(&object(source.clone())));
    json.insert("quantization_config".into(), source["quantization_config"].clone());
    assert_eq!(Value::Object(json), source);
}

#[test]
fn one_kind_key_remains() {
    for (scaling, expected) in [
        (
            json!({ "type": "linear", "rope_type": "linear", "factor": 2.0 }),
            json!({ "rope_type": "linear", "factor": 2.0 }),
        ),
        (
            json!({ "type": "linear", "rope_type": null, "factor": 2.0 }),
            json!({ "type": "linear", "factor": 2.0 }),
        ),
        (
            json!({ "type": null, "rope_type": "linear", "factor": 2.0 }),
            json!({ "rope_type": "linear", "factor": 2.0 }),
        ),
        (json!({ "type": "linear", "factor": 2.0 }), json!({ "type": "linear", "factor": 2.0 })),
    ] {
        let Config { json, notes } = with_rope(json!({ "rope_theta": 1e4, "rope_scaling": scaling }));
        assert_eq!(json["rope_scaling"], expected);
        assert_eq!(notes, []);
    }
    let both = json!({ "type": "yarn", "rope_type": "linear", "factor": 2.0 });
    let Config { json, notes } = with_rope(json!({ "rope_theta": 1e4, "rope_scaling": both }));
    assert_eq!(json["rope_scaling"], json!({ "rope_type": "linear", "factor": 2.0 }));
    let differ = ConfigNote::RopeKindsDiffer { rope_type: "linear".into(), dropped_type: "yarn".into() };
    assert_eq!(notes, [differ]);
}

#[test]
fn yarn_needs_its_original_length_inside() {
    let scaling = json!({ "type": "yarn", "factor": 4.0 });
    let inside = json!({ "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768 });
    let Config { json, notes } = with_rope(json!({
        "rope_theta": 1e6, "rope_scaling": scaling, "original_max_position_embeddings": 32768,
    }));
    let (max_position_embeddings, original_max_position_embeddings) = (131072, 32768);
    let ramp = ConfigNote::YarnRamp { max_position_embeddings, original_max_position_embeddings };
    assert_eq!((&json["rope_scaling"], &notes[..]), (&inside, &[ramp][..]));

    let Config { json, notes } = with_rope(json!({ "rope_theta": 1e6, "rope_scaling": scaling }));
    assert_eq!(json["rope_scaling"], scaling);
    let missing = ConfigNote::RopeKeyMissing { kind: "yarn".into(), key: "original_max_position_embeddings" };
    assert_eq!(notes, [missing]);

    // Qwen2.5's card: the context stays at 32768, where exllamav2 leaves yarn off.
    let Config { json, notes } = with_rope(json!({
        "rope_theta": 1e6, "max_position_embeddings": 32768, "rope_scaling": inside.clone(),
    }));
    assert_eq!(json["original_max_position_embeddings"], json!(32768));
    assert_eq!(json["rope_scaling"], inside);
    let max_position_embeddings = 32768;
    let inactive = ConfigNote::YarnInactive { max_position_embeddings, original_max_position_embeddings };
    assert_eq!(notes, [inactive]);
}

#[test]
fn yarn_settings_that_exllamav2_does_not_read() {
    let ignored = |settings: Value| {
        let mut scaling = object(json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6,
        }));
        scaling.extend(object(settings));
        let Config { notes, .. } = with_rope(json!({ "rope_parameters": scaling }));
        let key = |note: &ConfigNote| match note {
            ConfigNote::RopeKeyIgnored { key, .. } => Some(*key),
            _ => None,
        };
        notes.iter().filter_map(key).collect::<Vec<_>>()
    };
    // 0.1 · ln 4 + 1
    let usual = 1.138_629_436_111_989;
    let as_usual = json!({
        "beta_fast": 32, "beta_slow": 1.0, "attention_factor": usual, "truncate": true, "mscale": 1.0,
    });
    assert_eq!(ignored(as_usual), [""; 0]);
    assert_eq!(
        ignored(json!({ "beta_fast": 64, "attention_factor": 1.0 })),
        ["beta_fast", "attention_factor"]
    );
    assert_eq!(ignored(json!({ "mscale": 1.0, "mscale_all_dim": 1.0 })), ["mscale", "mscale_all_dim"]);
    assert_eq!(ignored(json!({ "truncate": false, "beta_slow": 2 })), ["beta_slow", "truncate"]);
}

#[test]
fn longrope_needs_its_original_length_at_top_level() {
    let scaling = json!({
        "type": "longrope", "long_factor": [1.0, 2.0], "short_factor": [1.0, 1.0],
        "original_max_position_embeddings": 4096,
    });
    let Config { json, notes } = with_rope(json!({ "rope_theta": 1e4, "rope_scaling": scaling }));
    assert_eq!((&json["original_max_position_embeddings"], notes), (&json!(4096), vec![]));
    let scaling = json!({ "type": "su", "long_factor": [1.0] });
    let Config { notes, .. } = with_rope(json!({ "rope_theta": 1e4, "rope_scaling": scaling }));
    let missing = |key| ConfigNote::RopeKeyMissing { kind: "su".into(), key };
    assert_eq!(notes, [missing("short_factor"), missing("original_max_position_embeddings")]);
}

#[test]
fn what_exllamav2_makes_nothing_of() {
    let notes = |rope: Value| with_rope(rope).notes;
    for kind in ["dynamic", "ntk", "proportional"] {
        let scaling = json!({ "rope_type": kind, "factor": 2.0, "rope_theta": 1e4 });
        assert_eq!(
            notes(json!({ "rope_parameters": scaling })),
            [ConfigNote::RopeKindIgnored { kind: kind.into() }]
        );
    }
    assert_eq!(
        notes(json!({ "rope_theta": 1e4, "rope_scaling": { "factor": 2.0 } })),
        [ConfigNote::RopeKindMissing]
    );
    assert_eq!(
        notes(json!({ "rope_theta": 1e4, "rope_scaling": "linear" })),
        [ConfigNote::RopeNotAnObject { key: "rope_scaling" }]
    );
    assert_eq!(notes(json!({})), [ConfigNote::NoRopeTheta]);
    assert_eq!(notes(json!({ "rope_theta": null, "rope_parameters": {} })), [ConfigNote::NoRopeTheta]);
    assert_eq!(notes(json!({ "text_config": { "rope_theta": 1e6 } })), []);
    let layers =
        json!({ "full_attention": { "rope_theta": 1e6 }, "sliding_attention": { "rope_theta": 1e4 } });
    let Config { json, notes } = with_rope(json!({ "rope_parameters": layers }));
    assert_eq!((json.get("rope_theta"), notes), (None, vec![ConfigNote::RopePerLayerType]));
}

#[test]
fn two_places_that_disagree() {
    // transformers 5: rope_parameters' theta before the one at top level ...
    let Config { json, notes } = with_rope(json!({
        "rope_theta": 10000, "rope_parameters": { "rope_theta": 5e5, "rope_type": "default" },
    }));
    assert_eq!(json["rope_theta"], json!(5e5));
    assert!(matches!(notes[..], [ConfigNote::RopeDisagrees { key: "rope_theta", .. }]), "{notes:?}");
    // ... and the same number in another spelling is no disagreement ...
    let Config { json, notes } = with_rope(json!({
        "rope_theta": 10000, "rope_parameters": { "rope_theta": 10000.0, "rope_type": "default" },
    }));
    assert_eq!((&json["rope_theta"], notes), (&json!(10000), vec![]));
    // ... but a rope_scaling takes the place of rope_parameters.
    let Config { json, notes } = with_rope(json!({
        "rope_theta": 10000, "rope_scaling": { "type": "linear", "factor": 2.0 },
        "rope_parameters": { "rope_theta": 5e5, "rope_type": "default" },
    }));
    assert_eq!(json["rope_theta"], json!(10000));
    assert_eq!(json["rope_scaling"], json!({ "type": "linear", "factor": 2.0 }));
    assert!(matches!(notes[..], [ConfigNote::RopeDisagrees { key: "rope_scaling", .. }]), "{notes:?}");
}

#[test]
fn no_checkpoint_format_survives() {
    let Config { json, .. } = convert(json!({
        "architectures": ["LlamaForCausalLM"], "rope_theta": 1e4,
        "quantization_config": { "quant_method": "gptq", "checkpoint_format": "gptq_v2" },
        "text_config": { "hidden_size": 64, "quantization_config": { "checkpoint_format": "gptq_v2" } },
    }));
    assert!(!config_json(&json).contains("gptq"), "{json:?}");
    assert_eq!(json["text_config"], json!({ "hidden_size": 64 }));
}

#[test]
fn dtypes_say_float16() {
    for (source, expected) in [
        (
            json!({ "torch_dtype": "bfloat16", "dtype": "float32" }),
            json!({ "torch_dtype": "float16", "dtype": "float16" }),
        ),
        (json!({ "dtype": null }), json!({ "dtype": "float16" })),
        (json!({}), json!({ "torch_dtype": "float16" })),
    ] {
        let Config { mut json, .. } = convert(source);
        json.shift_remove("quantization_config");
        assert_eq!(Value::Object(json), expected);
    }
}

#[test]
fn sliding_windows_that_are_not_applied() {
    let notes = |architecture: &str, more: Value| {
        let mut source = object(json!({
            "architectures": [architecture], "rope_theta": 1e4, "max_position_embeddings": 32768,
        }));
        source.extend(object(more));
        exl2_config(&source, &FACTS).notes
    };
    let window = [ConfigNote::SlidingWindow { window: 4096 }];
    assert_eq!(notes("MistralForCausalLM", json!({ "sliding_window": 4096 })), window);
    assert_eq!(notes("MistralForCausalLM", json!({ "sliding_window": null })), []);
    assert_eq!(notes("MistralForCausalLM", json!({ "sliding_window": 32768 })), []);
    assert_eq!(notes("Qwen2ForCausalLM", json!({ "sliding_window": 4096, "use_sliding_window": false })), []);
    assert_eq!(
        notes("Qwen2ForCausalLM", json!({ "sliding_window": 4096, "use_sliding_window": true })),
        window
    );
    assert_eq!(notes("Qwen3ForCausalLM", json!({ "sliding_window": 4096 })), []);
    assert_eq!(notes("LlamaForCausalLM", json!({ "sliding_window": 4096 })), []);
}

#[test]
fn architectures_must_be_one() {
    for (architectures, count) in [(json!([]), 0), (json!(null), 0), (json!(["A", "B"]), 2)] {
        let Config { notes, .. } = convert(json!({ "architectures": architectures, "rope_theta": 1e4 }));
        assert_eq!(notes, [ConfigNote::Architectures { count }]);
        assert!(notes[0].to_string().contains(&count.to_string()));
    }
}

#[test]
fn text_is_indented_by_two_and_ends_in_a_newline() {
    let json = object(json!({ "b": [1], "a": { "c": 1e-6 } }));
    assert_eq!(config_json(&json), "{\n  \"b\": [\n    1\n  ],\n  \"a\": {\n    \"c\": 1e-6\n  }\n}\n");
}

#[test]
fn keys_that_exllamav2_insists_on_are_added() {
    let facts = Exl2Facts { bpw: 4.0, head_bits: 16, untied: false };
    let converted = |source: Value| exl2_config(source.as_object().unwrap(), &facts).json;
    let starcoder = converted(json!({"architectures": ["Starcoder2ForCausalLM"], "norm_epsilon": 1e-5}));
    assert_eq!(starcoder["layer_norm_epsilon"], 1e-5);
    let bigcode = json!({"architectures": ["GPTBigCodeForCausalLM"], "n_embd": 64, "n_inner": null});
    assert_eq!(converted(bigcode)["n_inner"], 256);
    let pixtral = json!({
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "patch_size": 16}
    });
    let vision = &converted(pixtral)["vision_config"];
    assert_eq!((&vision["rope_theta"], vision.get("spatial_patch_size")), (&json!(10000.0), None));
    let qwen = json!({
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl",
        "vision_config": {"patch_size": 14}
    });
    assert_eq!(converted(qwen)["vision_config"]["spatial_patch_size"], 14);
}

#[test]
fn gptq_and_dense_outputs_state_rope_where_older_readers_look_and_change_nothing_else() {
    let source = object(smollm2());
    let mut expected = source.clone();
    expected.insert("rope_theta".into(), json!(100_000.0));
    let quantization = object(source["quantization_config"].clone());
    assert_eq!(gptq_config(&source, quantization).json, expected);
    expected.shift_remove("quantization_config");
    expected.insert("dtype".into(), json!("float16"));
    assert_eq!(dense_config(&source, "float16").json, expected);
}
