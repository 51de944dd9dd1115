"""What a config.json leaves unsaid, read from the classes of Transformers 5.24 on 2026-11-30.

Transformers writes a nested `text_config` as its difference from the class's defaults, so a key that is not there means
"the default of that class", which differs from family to family (google/gemma-3-12b-it leaves out head_dim, which is
256 and not 3840 / 16). Hence lists of families for which a missing key is known to be derived, and no guess for others.
"""

from __future__ import annotations

__all__ = [
    "BEYOND",
    "FULL",
    "FULL_EVERY",
    "HEAD_DIM_FROM_HIDDEN",
    "KINDS",
    "KV_HEADS_FROM_Q",
    "MUST_STATE",
    "OTHER_KV_NAMES",
    "SLIDING",
    "STATE",
]

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = {FULL: FULL, "attention": FULL, SLIDING: SLIDING}

# Which layers slide when the file has a window and no layer_types. 0: all of them; n: all but every n-th.
FULL_EVERY = {
    "mistral": 0,
    "mixtral": 0,
    "phi3": 0,
    "starcoder2": 0,
    "gemma2": 2,
    "gpt_oss": 2,
    "cohere2": 4,
    "gemma3n_text": 5,
    "gemma3_text": 6,
}

# head_dim = hidden_size / num_attention_heads where it is missing.
HEAD_DIM_FROM_HIDDEN = frozenset(
    {
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "exaone4",
        "granite",
        "granitemoe",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)
# num_key_value_heads = num_attention_heads where it is missing.
KV_HEADS_FROM_Q = frozenset(
    {
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "granite",
        "granitemoe",
        "llama",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi",
        "phi3",
    }
)
# Keys whose default in the class is not "none": a file must state them.
MUST_STATE = {
    "mistral": ("sliding_window",),
    "ministral": ("sliding_window",),
    "gemma2": ("sliding_window",),
    "gemma3_text": ("sliding_window",),
    "gemma3n_text": ("sliding_window", "num_kv_shared_layers"),
    "gemma4_text": ("sliding_window", "num_kv_shared_layers", "global_head_dim"),
    "gpt_oss": ("sliding_window",),
    "cohere2": ("sliding_window",),
    "exaone4": ("sliding_window",),
    "olmo3": ("sliding_window",),
    "llama4_text": ("attention_chunk_size",),
    "deepseek_v32": ("index_topk",),
    "glm_moe_dsa": ("index_topk",),
    "qwen3_next": ("layer_types",),
}

# Keys that make layers differ in ways the fields read here do not tell.
BEYOND = {
    "global_head_dim": "full-attention layers have another head_dim",
    "num_global_key_value_heads": "full-attention layers have another number of kv heads",
    "swa_num_key_value_heads": "sliding layers have another number of kv heads",
    "swa_head_dim": "sliding layers have another head_dim",
    "per_layer_config": "layers differ one by one",
    "block_configs": "layers differ one by one",
    "num_key_value_heads_per_layer": "layers differ one by one",
    "index_topk": "there is an index store beside the latent one",
    "compress_ratios": "layers store compressed tokens",
    "use_cla": "layers share caches in a pattern of their own",
    "attention_chunk_size": "attention is chunked, which is not a sliding window",
    "is_encoder_decoder": "the decoder also caches cross-attention",
    "use_bidirectional_attention": "attention is not causal",
}
STATE = {
    "full_attention_interval": "most layers are linear attention",
    "linear_attn_config": "some layers are linear attention",
    "attn_layer_period": "most layers are mamba",
    "attn_type_list": "some layers are linear attention",
    "hybrid_override_pattern": "some layers are mamba",
    "layers_block_type": "some layers are mamba",
    "ssm_cfg": "some layers are mamba",
}
# Names of the number of kv heads in older families; their meaning differs too much to be read.
OTHER_KV_NAMES = ("multi_query", "num_kv_heads", "n_head_kv", "multi_query_group_num")
