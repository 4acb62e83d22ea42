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
    let linears = arch.linears(&dims, &Names::LLAMA);
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
    let naming = |name: &str, tensors: &[&str]| {
        let mut config = mixtral();
        config.insert("architectures".into(), json!([name]));
        let arch = find(&config).unwrap();
        let dims = Dims::read(arch, &config).unwrap();
        *arch.naming(&dims, |prefix| tensors.iter().any(|tensor| tensor.starts_with(prefix)))
    };
    let experts = |tensor| naming("MixtralForCausalLM", &[tensor]).experts;
    assert_eq!(experts("model.layers.0.mlp.experts.0.gate_proj.qweight"), ExpertNames::MLP);
    assert_eq!(experts("model.layers.0.block_sparse_moe.experts.0.w1.qweight"), ExpertNames::MIXTRAL);
    // As GPTQModel writes Phi-3.
    let phi3 = naming(
        "Phi3ForCausalLM",
        &["model.layers.0.self_attn.qkv_proj.qweight", "model.layers.0.mlp.gate_proj.qweight"],
    );
    assert!(matches!(phi3.attention, AttentionNames::Fused(_)) && matches!(phi3.mlp, MlpNames::Gated(_)));
    // Where nothing tells, the names are those that exllamav2 looks for.
    assert_eq!(naming("Phi3ForCausalLM", &[]), Names::LLAMA);
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
        arch.linears(&dims, arch.exl2_names())
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
    assert_eq!(arch.linears(&dims, arch.exl2_names())[4].name, "model.layers.0.mlp.gate_proj");
}

/// The linears of the first block by role, where each lies in the source.
fn places(name: &str, naming: usize) -> Vec<(Role, String, Option<Vec<usize>>)> {
    let mut config = mixtral();
    config.insert("architectures".into(), json!([name]));
    let arch = find(&config).unwrap();
    let dims = Dims::read(arch, &config).unwrap();
    let block = arch.block(&dims, &arch.names[naming], 0);
    block.into_iter().map(|l| (l.role, l.name, l.columns.map(|c| c.iter().collect()))).collect()
}

#[test]
fn a_fused_linear_gives_its_columns_to_several() {
    let phi3 = places("Phi3ForCausalLM", 1);
    let qkv = || "model.layers.0.self_attn.qkv_proj".to_string();
    // Four heads of 16, two for keys and values.
    assert_eq!(phi3[0], (Role::Q, qkv(), Some((0..64).collect())));
    assert_eq!(phi3[1], (Role::K, qkv(), Some((64..96).collect())));
    assert_eq!(phi3[2], (Role::V, qkv(), Some((96..128).collect())));
    let both = || "model.layers.0.mlp.gate_up_proj".to_string();
    assert_eq!(phi3[4], (Role::Gate, both(), Some((0..96).collect())));
    assert_eq!(phi3[5], (Role::Up, both(), Some((96..192).collect())));
    assert_eq!(phi3[6], (Role::Down, "model.layers.0.mlp.down_proj".into(), None));
}

#[test]
fn interleaved_columns_are_those_of_each_key_value_head() {
    // For each of the two: two query heads, a key, a value (exllamav2, module.py: altpack_qkv).
    let internlm2 = places("InternLM2ForCausalLM", 1);
    let columns = |role: usize| internlm2[role].2.clone().unwrap();
    assert_eq!(columns(0), (0..32).chain(64..96).collect::<Vec<_>>());
    assert_eq!(columns(1), (32..48).chain(96..112).collect::<Vec<_>>());
    assert_eq!(columns(2), (48..64).chain(112..128).collect::<Vec<_>>());
}

#[test]
fn columns_are_cut_from_rows_and_from_transposed_weights() {
    let columns = Columns::strided(1, 2, 3, 2);
    assert_eq!((columns.count(), columns.end()), (4, 6));
    let matrix: Vec<u8> = (0..12).collect();
    assert_eq!(columns.of(&matrix, 6), [1, 2, 4, 5, 7, 8, 10, 11]);
    assert_eq!(columns.rows_of(&matrix, 2), [2, 3, 4, 5, 8, 9, 10, 11]);
}

#[test]
fn columns_that_a_file_makes_up_are_refused() {
    let read = |value: Value| serde_json::from_value::<Columns>(value);
    assert_eq!(read(json!([[0, 2], [2, 3]])).unwrap().iter().collect::<Vec<_>>(), [0, 1, 2]);
    for bad in
        [json!([[2, 1]]), json!([[1, 1]]), json!([[0, 4], [3, 6]]), json!([[4, 5], [0, 1]]), json!([[0]])]
    {
        assert!(read(bad.clone()).is_err(), "{bad}");
    }
}

#[test]
fn an_mlp_without_a_gate_has_two_linears() {
    let roles: Vec<Role> = places("Starcoder2ForCausalLM", 0).into_iter().map(|place| place.0).collect();
    assert_eq!(roles, [Role::Q, Role::K, Role::V, Role::O, Role::Up, Role::Down]);
}

#[test]
fn experts_and_a_shared_one() {
    let mut config = mixtral();
    config.insert("architectures".into(), json!(["Qwen2MoeForCausalLM"]));
    config.insert("shared_expert_intermediate_size".into(), json!(160));
    let arch = find(&config).unwrap();
    let dims = Dims::read(arch, &config).unwrap();
    let block = arch.block(&dims, &arch.names[0], 1);
    let shared: Vec<&Linear> = block[4..].iter().filter(|linear| linear.expert.is_none()).collect();
    assert_eq!(shared.len(), 3);
    assert_eq!(shared[2].name, "model.layers.1.mlp.shared_expert.down_proj");
    assert_eq!((shared[2].in_features, shared[2].out_features), (160, 64));
    let gate = "model.layers.1.mlp.shared_expert_gate.weight";
    assert!(arch.dense_tensors(&dims, &arch.names[0]).iter().any(|t| t.name == gate && t.shape == [1, 64]));
}
