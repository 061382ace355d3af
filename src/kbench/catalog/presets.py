"""Model presets: the shapes of published transformers, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kbench.catalog.models import ModelShape, Rope
from kbench.errors import UsageError

_LATENT = ("multi-head latent attention", "grouped sigmoid routing")
_GPT_OSS_ROPE = Rope(
    "yarn", factor=32.0, original_context=4_096, truncate=False, magnitude=1.3465735902799727
)  # 0.1 ln 32 + 1, the default of yarn

_MODELS = (
    ModelShape(
        "tiny", 2, 128, 8, 2, 32, 256, 512,
        source="kbench: small enough for a laptop, GQA 4, head size 32",
    ),
    ModelShape(
        "nano", 2, 128, 4, 1, 32, 256, 512,
        source="kbench: tiny with half of its heads; what a 2-core machine can decide a claim on in three minutes",
    ),
    ModelShape(
        "small", 4, 512, 8, 4, 64, 1_408, 8_192,
        source="kbench: a CPU model whose GEMMs are not negligible",
    ),
    ModelShape(
        "tiny-moe", 2, 128, 8, 2, 32, 256, 512, experts=8, experts_per_token=2, expert_intermediate=128,
        source="kbench: tiny with eight experts",
    ),
    ModelShape(
        "tiny-window", 2, 128, 8, 2, 32, 256, 512,
        attention_bias=True, output_bias=True, mlp_bias=True, windows=(48, 0), sinks=True, experts=8,
        experts_per_token=4, expert_intermediate=128, swiglu_limit=7.0, swiglu_alpha=1.702,
        source="kbench: gpt-oss in small, two kinds of layers in turn",
    ),
    ModelShape(
        "llama-3.2-1b", 16, 2_048, 32, 8, 64, 8_192, 128_256,
        rope_theta=500_000.0, tied_embeddings=True,
        source="meta-llama/Llama-3.2-1B config.json",
    ),
    ModelShape(
        "llama-3.2-3b", 28, 3_072, 24, 8, 128, 8_192, 128_256,
        rope_theta=500_000.0, tied_embeddings=True,
        source="meta-llama/Llama-3.2-3B config.json",
    ),
    ModelShape(
        "llama-3-8b", 32, 4_096, 32, 8, 128, 14_336, 128_256,
        rope_theta=500_000.0,
        source="meta-llama/Meta-Llama-3-8B config.json",
    ),
    ModelShape(
        "llama-3-70b", 80, 8_192, 64, 8, 128, 28_672, 128_256,
        rope_theta=500_000.0,
        source="meta-llama/Meta-Llama-3-70B config.json",
    ),
    ModelShape(
        "llama-3.1-405b", 126, 16_384, 128, 8, 128, 53_248, 128_256,
        rope_theta=500_000.0,
        source="meta-llama/Llama-3.1-405B config.json",
    ),
    ModelShape(
        "mistral-7b", 32, 4_096, 32, 8, 128, 14_336, 32_768,
        rope_theta=1_000_000.0, max_context=32_768,
        source="mistralai/Mistral-7B-v0.3 config.json",
    ),
    ModelShape(
        "qwen2.5-7b", 28, 3_584, 28, 4, 128, 18_944, 152_064,
        rope_theta=1_000_000.0, norm_eps=1e-06, attention_bias=True,
        source="Qwen/Qwen2.5-7B config.json",
    ),
    ModelShape(
        "qwen2.5-72b", 80, 8_192, 64, 8, 128, 29_568, 152_064,
        rope_theta=1_000_000.0, norm_eps=1e-06, attention_bias=True,
        source="Qwen/Qwen2.5-72B config.json",
    ),
    ModelShape(
        "qwen3-0.6b", 28, 1_024, 16, 8, 128, 3_072, 151_936,
        rope_theta=1_000_000.0, norm_eps=1e-06, qk_norm=True, tied_embeddings=True,
        source="Qwen/Qwen3-0.6B config.json",
    ),
    ModelShape(
        "qwen3-1.7b", 28, 2_048, 16, 8, 128, 6_144, 151_936,
        rope_theta=1_000_000.0, norm_eps=1e-06, qk_norm=True, tied_embeddings=True,
        source="Qwen/Qwen3-1.7B config.json",
    ),
    ModelShape(
        "qwen3-4b", 36, 2_560, 32, 8, 128, 9_728, 151_936,
        rope_theta=1_000_000.0, norm_eps=1e-06, qk_norm=True, tied_embeddings=True,
        source="Qwen/Qwen3-4B config.json",
    ),
    ModelShape(
        "qwen3-8b", 36, 4_096, 32, 8, 128, 12_288, 151_936,
        rope_theta=1_000_000.0, norm_eps=1e-06, qk_norm=True,
        source="Qwen/Qwen3-8B config.json",
    ),
    ModelShape(
        "qwen3-14b", 40, 5_120, 40, 8, 128, 17_408, 151_936,
        rope_theta=1_000_000.0, norm_eps=1e-06, qk_norm=True,
        source="Qwen/Qwen3-14B config.json",
    ),
    ModelShape(
        "qwen3-32b", 64, 5_120, 64, 8, 128, 25_600, 151_936,
        rope_theta=1_000_000.0, norm_eps=1e-06, qk_norm=True,
        source="Qwen/Qwen3-32B config.json",
    ),
    ModelShape(
        "qwen3-30b-a3b", 48, 2_048, 32, 4, 128, 6_144, 151_936,
        rope_theta=1_000_000.0, norm_eps=1e-06, qk_norm=True, experts=128, experts_per_token=8,
        expert_intermediate=768,
        source="Qwen/Qwen3-30B-A3B config.json; no layer uses the dense width",
    ),
    ModelShape(
        "qwen3-235b-a22b", 94, 4_096, 64, 4, 128, 12_288, 151_936,
        rope_theta=1_000_000.0, norm_eps=1e-06, qk_norm=True, experts=128, experts_per_token=8,
        expert_intermediate=1_536,
        source="Qwen/Qwen3-235B-A22B config.json; no layer uses the dense width",
    ),
    ModelShape(
        "qwen1.5-moe-a2.7b", 24, 2_048, 16, 16, 128, 5_632, 151_936,
        rope_theta=1_000_000.0, norm_eps=1e-06, attention_bias=True, experts=60, experts_per_token=4,
        expert_intermediate=1_408, norm_topk_prob=False, shared_experts=1, shared_intermediate=5_632,
        shared_gate=True, max_context=8_192,
        source="Qwen/Qwen1.5-MoE-A2.7B config.json",
    ),
    ModelShape(
        "mixtral-8x7b", 32, 4_096, 32, 8, 128, 14_336, 32_000,
        rope_theta=1_000_000.0, experts=8, experts_per_token=2, expert_intermediate=14_336,
        source="mistralai/Mixtral-8x7B-v0.1 config.json",
    ),
    ModelShape(
        "mixtral-8x22b", 56, 6_144, 48, 8, 128, 16_384, 32_768,
        rope_theta=1_000_000.0, experts=8, experts_per_token=2, expert_intermediate=16_384, max_context=65_536,
        source="mistralai/Mixtral-8x22B-v0.1 config.json",
    ),
    ModelShape(
        "deepseek-v3", 61, 7_168, 128, 128, 128, 18_432, 129_280,
        norm_eps=1e-06, latent=512, latent_rope=64, experts=256, experts_per_token=8, expert_intermediate=2_048,
        shared_experts=1, dense_layers=3, foreign=_LATENT,
        source="deepseek-ai/DeepSeek-V3 config.json",
    ),
    ModelShape(
        "kimi-k2", 61, 7_168, 64, 64, 128, 18_432, 163_840,
        norm_eps=1e-06, latent=512, latent_rope=64, experts=384, experts_per_token=8, expert_intermediate=2_048,
        shared_experts=1, dense_layers=1, foreign=_LATENT,
        source="moonshotai/Kimi-K2-Instruct-0905 config.json; dense width from one source only",
    ),
    ModelShape(
        "gpt-oss-120b", 36, 2_880, 64, 8, 64, 2_880, 201_088,
        rope_theta=150_000.0, attention_bias=True, output_bias=True, mlp_bias=True, windows=(128, 0), sinks=True,
        experts=128, experts_per_token=4, expert_intermediate=2_880, swiglu_limit=7.0, swiglu_alpha=1.702,
        rope=_GPT_OSS_ROPE,
        source="openai/gpt-oss-120b config.json; every other layer has the window",
    ),
    ModelShape(
        "gpt-oss-20b", 24, 2_880, 64, 8, 64, 2_880, 201_088,
        rope_theta=150_000.0, attention_bias=True, output_bias=True, mlp_bias=True, windows=(128, 0), sinks=True,
        experts=32, experts_per_token=4, expert_intermediate=2_880, swiglu_limit=7.0, swiglu_alpha=1.702,
        rope=_GPT_OSS_ROPE,
        source="openai/gpt-oss-20b config.json; every other layer has the window",
    ),
    ModelShape(
        "llama-4-scout", 48, 5_120, 40, 8, 128, 8_192, 202_048,
        rope_theta=500_000.0, experts=16, experts_per_token=1, expert_intermediate=8_192, shared_experts=1,
        foreign=("chunked attention", "layers without positions", "sigmoid routing"),
        source="meta-llama/Llama-4-Scout-17B-16E, from one source only",
    ),
    ModelShape(
        "phi-4", 40, 5_120, 40, 10, 128, 17_920, 100_352,
        rope_theta=250_000.0, max_context=16_384,
        source="microsoft/phi-4 config.json",
    ),
    ModelShape(
        "phi-3-mini", 32, 3_072, 32, 32, 96, 8_192, 32_064,
        max_context=4_096,
        source="microsoft/Phi-3-mini-4k-instruct config.json",
    ),
    ModelShape(
        "gemma-2-9b", 42, 3_584, 16, 8, 256, 14_336, 256_000,
        norm_eps=1e-06, tied_embeddings=True, windows=(4_096, 0), softcap=50.0, max_context=8_192,
        foreign=("four norms a layer", "a GELU gate", "scaled embeddings", "capped logits"),
        source="google/gemma-2-9b config.json; every other layer has the window",
    ),
    ModelShape(
        "gemma-3-27b", 62, 5_376, 32, 16, 128, 21_504, 262_144,
        rope_theta=1_000_000.0, norm_eps=1e-06, tied_embeddings=True, qk_norm=True,
        windows=(1_024, 1_024, 1_024, 1_024, 1_024, 0),
        foreign=("four norms a layer", "a GELU gate", "scaled embeddings", "two bases of rotary positions"),
        source="google/gemma-3-27b-pt config.json; five layers with the window to one without",
    ),
    ModelShape(
        "falcon-7b", 32, 4_544, 71, 1, 64, 18_176, 65_024,
        tied_embeddings=True, max_context=2_048,
        foreign=("LayerNorm", "attention beside the MLP", "an MLP without a gate"),
        source="tiiuae/falcon-7b config.json; dense width from one source only",
    ),
)  # fmt: skip
MODELS: Mapping[str, ModelShape] = MappingProxyType({model.name: model for model in _MODELS})


def model_shape(name: str) -> ModelShape:
    if name not in MODELS:
        raise UsageError(f"no model preset {name!r}", remedy=f"one of {', '.join(MODELS)}; see kbench list models")
    return MODELS[name]
