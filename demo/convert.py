"""A Hugging Face directory from a llama GGUF with a SmolLM tokenizer; needs neither torch nor transformers.

Shapes: R rows (outputs of a projection), C columns (its inputs).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers import decoders as decode
from tokenizers import models as model
from tokenizers import pre_tokenizers as pre

Array = npt.NDArray[np.float32]

_OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, directory: Path) -> None:
    """Write weights (float32), config, generation config and tokenizer of the GGUF `source` into `directory`.

    Raises:
        OSError: a file could not be written.
    """
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {hf_name(tensor.name): float32_weight(tensor, heads) for tensor in reader.tensors}
    # transformers refuses a safetensors file that does not say who its layout is for
    weights = directory / "model.safetensors"
    try:
        save_file(tensors, weights, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    # safetensors makes its files unreadable to others, such as the user of a container that mounts this folder
    weights.chmod(0o644)
    special_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", special_ids)
    build_tokenizer(fields).save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(fields))


def hf_name(name: str) -> str:
    """Return the Hugging Face name of the GGUF tensor `name`."""
    stem = name.removesuffix(".weight")
    if stem in _OUTSIDE_LAYERS:
        return f"{_OUTSIDE_LAYERS[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_IN_LAYER[part]}.weight"


def float32_weight(tensor: gguf.ReaderTensor, heads: dict[str, int]) -> Array:
    """Return a tensor dequantised, rows of query and key projections in Hugging Face order.

    `heads` holds the number of heads of each permuted projection, by the GGUF's name of it.
    """
    weight: Array = gguf.dequantize(tensor.data, tensor.tensor_type)
    part = tensor.name.split(".")[-2]
    return unpermute(weight, heads[part]) if part in heads else weight


def unpermute(weight_RC: Array, heads: int) -> Array:
    """Return a projection with the rows of each head in halves instead of pairs.

    llama.cpp rotates neighbouring rows and stores (0, h/2, 1, h/2 + 1, ...); Hugging Face rotates row i with row
    i + h/2, h being the rows of a head. Source: `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    rows, columns = weight_RC.shape
    pairs = weight_RC.reshape(heads, rows // heads // 2, 2, columns)
    # a copy in C order: safetensors writes the memory as it lies and ignores strides
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json; the embedding is tied, since the GGUF holds no output weight."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": _shortest(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": fields["llama.vocab_size"],
    }


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Return the byte-level BPE of the GGUF, with every digit a token of its own.

    A GGUF names its pre-tokenizer ("smollm") and leaves the rules to the reader: digits one by one, then GPT-2's.
    """
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    left_right = [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]]
    bpe = model.BPE({token: i for i, token in enumerate(tokens)}, [(left, right) for left, right in left_right])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decode.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, chat template included."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        # any GPT-2 class makes transformers rebuild the pre-tokenizer and lose the digits step
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def _shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05 where the GGUF gives 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
