"""FlashInfer-Trace definitions and workloads: mapped to our operations, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kbench.catalog import model_shape, parse_shape, resolve_shape
from kbench.errors import UsageError
from kbench.suite.flashinfer import Found, read

BF16 = {"dtype": "bfloat16"}
PAGED = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16}
RANDOM = {"type": "random"}


def definition(name: str, op_type: str, axes: dict[str, Any], *inputs: str, **changed: Any) -> dict[str, Any]:
    """In the form of their schema; an axis of None is variable."""
    spelled = {
        key: {"type": "var"} if value is None else {"type": "const", "value": value} for key, value in axes.items()
    }
    tensors = {key: {"shape": [], **BF16} for key in inputs}
    return {
        "name": name,
        "op_type": op_type,
        "axes": spelled,
        "inputs": tensors,
        "outputs": {},
        "reference": "",
    } | changed


def line(name: str, axes: dict[str, int], **inputs: Any) -> dict[str, Any]:
    own = {"uuid": "u", "axes": axes, "inputs": inputs}
    return {"definition": name, "workload": own, "solution": None, "evaluation": None}


def read_both(folder: Path, defined: dict[str, Any], *lines: dict[str, Any]) -> Found:
    (folder / "d.json").write_text(json.dumps(defined))
    (folder / "w.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return read(folder / "d.json", folder / "w.jsonl")


MAPPED = [
    (
        definition("gemm_n4096_k4096", "gemm", {"M": None, "N": 4096, "K": 4096}, "A", "B"),
        {"M": 256},
        "gemm",
        "k=4096,m=256,n=4096",
    ),
    (
        definition("rmsnorm_h7168", "rmsnorm", {"batch_size": None, "hidden_size": 7168}, "hidden_states", "weight"),
        {"batch_size": 3},
        "norm.rmsnorm",
        "hidden=7168,rows=3",
    ),
    (
        definition(
            "fused_add_rmsnorm_h64", "rmsnorm", {"batch_size": None, "hidden_size": 64}, "hidden_states", "residual"
        ),
        {"batch_size": 3},
        "norm.add_rmsnorm",
        "hidden=64,rows=3",
    ),
    (
        definition("gqa_paged_decode_h32_kv8_d128_ps16", "gqa_paged", {**PAGED, "num_kv_indices": None}, "q"),
        {"batch_size": 4, "num_kv_indices": 100},
        "attention.decode",
        "4*1@400,head_dim=128,kv_heads=8,q_heads=32",
    ),
    (
        definition("gqa_paged_prefill_causal_h32", "gqa_paged", {**PAGED, "total_q": None}, "q", "qo_indptr"),
        {"total_q": 200, "len_indptr": 3, "num_kv_indices": 100},
        "attention.prefill",
        "2*100@800,head_dim=128,kv_heads=8,q_heads=32",
    ),
    (
        definition("gqa_ragged_prefill", "gqa_ragged", {**PAGED, "page_size": 1}, "q", "qo_indptr"),
        {"total_q": 64, "total_kv": 128, "len_indptr": 3},
        "attention.prefill",
        "2*32@64,head_dim=128,kv_heads=8,q_heads=32",
    ),
    (
        definition(
            "mla_paged_decode_h16_ckv512_kpe64_ps1",
            "mla_paged",
            {"num_qo_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 1},
            "q_nope",
        ),
        {"batch_size": 2, "num_kv_indices": 200},
        "attention.mla_decode",
        "2*1@100,heads=16,latent=512,rope=64",
    ),
    (
        definition("grouped_gemm_n64_k32", "grouped_gemm", {"G": None, "M": None, "N": 64, "K": 32}, "A", "B"),
        {"G": 4, "M": 8},
        "moe.grouped_gemm",
        "experts=4,k=32,n=64,tokens=32,top_k=1",
    ),
    (
        definition(
            "moe_topk2_e8", "moe", {"num_experts": 8, "hidden_size": 64, "intermediate_size": 32}, "hidden_states"
        ),
        {"seq_len": 5},
        "moe.fused",
        "experts=8,hidden=64,intermediate=32,tokens=5,top_k=2",
    ),
    (
        definition(
            "rope_with_cos_sin_cache_gptj_style_d128_rd64", "rope", {"head_size": 128, "rotary_dim": 64}, "q", "k"
        ),
        {"num_tokens": 7, "num_qo_heads": 8, "num_kv_heads": 2},
        "rope",
        "head_dim=128,interleaved=1,kv_heads=2,q_heads=8,rotary=64,tokens=7",
    ),
    (
        definition("top_p_sampling_from_probs_v500", "sampling", {"vocab_size": 500}, "probs", "top_p"),
        {"batch_size": 6},
        "sampling.chain",
        "allowed=1.0,history=0,k=0,p=0.9,rows=6,temperature=1.0,vocab=500",
    ),
]


@pytest.mark.parametrize(("defined", "axes", "op", "shape"), MAPPED, ids=[row[2] for row in MAPPED])
def test_what_has_a_counterpart_is_mapped(
    tmp_path: Path, defined: dict[str, Any], axes: dict[str, int], op: str, shape: str
) -> None:
    found = read_both(tmp_path, defined, line(defined["name"], axes), line("another", {"x": 1}))
    assert (found.definition.op, found.definition.dtype) == (op, "bfloat16")
    assert [(row.shape, row.calls) for row in found.recorded.rows] == [(shape, 1.0)]
    resolve_shape(op, parse_shape(shape), model_shape("tiny"))


def test_their_own_example_is_read_as_it_stands(tmp_path: Path) -> None:
    """examples/ffi/Example-FlashInfer-Trace of flashinfer-bench at 40e6ca7: one definition, two of its lines."""
    spec = {"shape": ["M", "K"], "dtype": "float16"}
    defined = {
        "name": "gemm_n4096_k4096",
        "description": "General matrix multiply (GEMM) C = A @ B.T. Captured from Llama 3.1 8B attn.o_proj.",
        "op_type": "gemm",
        "tags": ["status:verified", "model:llama-3.1-8b"],
        "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 4096}, "K": {"type": "const", "value": 4096}},
        "inputs": {"A": spec, "B": {"shape": ["N", "K"], "dtype": "float16"}},
        "outputs": {"C": {"shape": ["M", "N"], "dtype": "float16"}},
        "reference": "import torch\n\ndef run(A, B):\n    C = torch.matmul(A, B.T)\n    return C",
    }
    random = {"A": RANDOM, "B": RANDOM}
    found = read_both(tmp_path, defined, *(line("gemm_n4096_k4096", {"M": m}, **random) for m in (256, 248, 256)))
    assert [(row.shape, row.calls) for row in found.recorded.rows] == [
        ("k=4096,m=256,n=4096", 2.0),
        ("k=4096,m=248,n=4096", 1.0),
    ]


def test_lengths_come_from_the_tensors_where_they_are_there(tmp_path: Path) -> None:
    save_file({"kv_indptr": np.array([0, 3, 10, 17], dtype=np.int32)}, tmp_path / "blob.safetensors")
    deep = tmp_path / "workloads"
    deep.mkdir()
    tensor = {"type": "safetensors", "path": "./blob.safetensors", "tensor_key": "kv_indptr"}
    defined = definition("gqa_paged_decode", "gqa_paged", {**PAGED, "page_size": 1}, "q")
    (tmp_path / "d.json").write_text(json.dumps(defined))
    (deep / "w.jsonl").write_text(json.dumps(line("gqa_paged_decode", {"batch_size": 3}, kv_indptr=tensor)))
    found = read(tmp_path / "d.json", deep / "w.jsonl")
    assert found.recorded.rows[0].shape.startswith("1*1@3+2*1@7,") and not found.recorded.notes


def test_the_epsilon_of_a_workload_is_its_own(tmp_path: Path) -> None:
    defined = definition("rmsnorm_h64", "rmsnorm", {"batch_size": None, "hidden_size": 64}, "hidden_states")
    eps = {"type": "scalar", "value": 1e-6}
    found = read_both(tmp_path, defined, line("rmsnorm_h64", {"batch_size": 3}, eps=eps))
    shape = resolve_shape("norm.rmsnorm", parse_shape(found.recorded.rows[0].shape), None)
    assert shape.number("eps") == pytest.approx(1e-6)


FP8 = definition("moe_fp8", "moe", {"num_experts": 8}, "x")
FP8["inputs"]["x"]["dtype"] = "float8_e4m3fn"
REFUSED = [
    (FP8, {}, "its inputs are float8_e4m3fn"),
    (definition("gdn_decode", "gdn", {}, "q"), {}, "op_type gdn"),
    (definition("mla_paged_prefill", "mla_paged", {}, "q", "qo_indptr"), {}, "only its decode"),
    (definition("q_gemm", "gemm", {}, "A", "A_scale"), {}, "scaled operands"),
    (definition("moe_e8", "moe", {"num_experts": 8, "num_local_experts": 4}, "x"), {}, "on one"),
    (definition("moe_e8", "moe", {"num_experts": 8}, "x"), {"seq_len": 4}, "no top_k"),
    (definition("min_p_sampling", "sampling", {}, "probs"), {}, "min-p"),
    (definition("gemm_n1", "gemm", {"N": 1}, "A"), {"M": 4}, "no axis K"),
    (definition("gemm_n1", "gemm", {"N": 1}, "A"), {"M": -4}, "whole numbers"),
    ({"name": "x"}, {}, "no FlashInfer-Trace definition"),
]


@pytest.mark.parametrize(("defined", "axes", "said"), REFUSED, ids=[said for _, _, said in REFUSED])
def test_what_cannot_be_mapped_is_one_line(
    tmp_path: Path, defined: dict[str, Any], axes: dict[str, int], said: str
) -> None:
    with pytest.raises(UsageError) as error:
        read_both(tmp_path, defined, line(defined["name"], axes))
    assert said in str(error.value) and "\n" not in str(error.value)
