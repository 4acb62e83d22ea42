use super::*;
use serde_json::json;

fn config(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

fn mixtral() -> Map<String, Value> {
    config(json!({
        "architectures": ["MixtralForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 100,
        "num_local_experts": 2, "head_dim": null
    }))
}

#[test]
fn sizes_come_from_the_configuration() {
    let config = mixtral();
    let arch = find(&config).unwrap();
    let dims = Dims::read(arch, &config).unwrap();
    assert_eq!((dims.head_dim, dims.kv_heads, dims.experts, dims.tied), (16, 2, Some(2), false));
    let linears = arch.linears(&dims, ExpertNames::MLP);
    assert_eq!(linears.len(), 2 * (4 + 2 * 3));
    let k = &linears[1];
    assert_eq!((k.name.as_str(), k.in_features, k.out_features), ("model.layers.0.self_attn.k_proj", 64, 32));
    let down = linears.iter().find(|l| l.role == Role::Down && l.expert == Some(1) && l.layer == 1).unwrap();
    assert_eq!(down.name, "model.layers.1.mlp.experts.1.down_proj");
    assert_eq!(down.exl2_name, "model.layers.1.block_sparse_moe.experts.1.w2");
    assert_eq!((down.in_features, down.out_features), (96, 64));
}

#[test]
fn the_naming_is_the_files() {
    let arch = find(&mixtral()).unwrap();
    assert_eq!(arch.naming(|p| "model.layers.0.mlp.experts.0".starts_with(p)), ExpertNames::MLP);
    assert_eq!(
        arch.naming(|p| "model.layers.0.block_sparse_moe.experts.0".starts_with(p)),
        ExpertNames::MIXTRAL
    );
}

#[test]
fn a_bad_size_is_named() {
    for bad in [json!(0), json!(-4), json!("64"), json!(1u64 << 40), json!(1.5)] {
        let mut config = mixtral();
        config.insert("hidden_size".into(), bad);
        assert_eq!(Dims::read(find(&config).unwrap(), &config).unwrap_err().key, "hidden_size");
    }
    let mut config = mixtral();
    config.remove("vocab_size");
    assert_eq!(Dims::read(find(&config).unwrap(), &config).unwrap_err().key, "vocab_size");
}

#[test]
fn biases_are_what_exllamav2_expects() {
    let expected = |extra: Value, arch: &str| -> Vec<Role> {
        let mut config = mixtral();
        config.insert("architectures".into(), json!([arch]));
        config.extend(extra.as_object().unwrap().clone());
        let arch = find(&config).unwrap();
        let dims = Dims::read(arch, &config).unwrap();
        arch.linears(&dims, ExpertNames::MLP)
            .iter()
            .filter(|l| l.layer == 0 && l.bias)
            .map(|l| l.role)
            .collect()
    };
    use Role::{Down, Gate, K, O, Q, Up, V};
    assert_eq!(expected(json!({}), "LlamaForCausalLM"), []);
    assert_eq!(expected(json!({"attention_bias": true}), "LlamaForCausalLM"), [Q, K, V, O]);
    assert_eq!(expected(json!({"mlp_bias": true}), "LlamaForCausalLM"), [Gate, Up, Down]);
    assert_eq!(expected(json!({"attention_bias": true}), "Qwen2ForCausalLM"), [Q, K, V]);
}

#[test]
fn some_blocks_of_a_mixture_are_plain() {
    let mut config = mixtral();
    config.insert("mlp_only_layers".into(), json!([0]));
    let arch = find(&config).unwrap();
    let dims = Dims::read(arch, &config).unwrap();
    assert_eq!((dims.experts_of(0), dims.experts_of(1)), (None, Some(2)));
    assert_eq!(arch.linears(&dims, ExpertNames::MIXTRAL)[4].name, "model.layers.0.mlp.gate_proj");
}
