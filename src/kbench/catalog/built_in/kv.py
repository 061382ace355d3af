"""Who moves keys and values: appending, copying and converting pages."""

from __future__ import annotations

from kbench.catalog.capability import AMPERE, GraphSupport, Implementation

ALWAYS = GraphSupport.ALWAYS

ENTRIES = (
    Implementation(
        "torch-kv-append",
        ("kv.append",),
        "kbench.kernels.movers:TorchAppend",
        "an indexed write",
        graph=ALWAYS,
        expects_operator="index_put",
    ),
    Implementation(
        "triton-kv-append",
        ("kv.append",),
        "kbench.kernels.triton_movers:TritonAppend",
        "one program a token",
        devices=("cuda",),
        lowest_capability=AMPERE,
        priority=20,
        graph=ALWAYS,
        expects_kernel="_append",
    ),
    Implementation(
        "torch-copy-pages",
        ("kv.copy_pages",),
        "kbench.kernels.movers:TorchCopyPages",
        "index_select, then index_copy_",
        graph=ALWAYS,
        expects_operator="index_copy_",
    ),
    Implementation(
        "torch-convert",
        ("kv.convert_pages", "kv.convert_layout"),
        "kbench.kernels.movers:TorchConvert",
        "slots of both sides in the plan, then a gather and a scatter",
        graph=ALWAYS,
        expects_operator="index_put",
    ),
    Implementation(
        "triton-convert-pages",
        ("kv.convert_pages", "kv.convert_layout"),
        "kbench.kernels.triton_movers:TritonConvert",
        "blocks of tokens from table to table, any page sizes and layouts",
        devices=("cuda",),
        lowest_capability=AMPERE,
        priority=20,
        graph=ALWAYS,
        expects_kernel="_convert",
    ),
)
