"""``python -m benchmarks.typed_onnx [MODEL ...]``: typed ONNX files beside other converters'.

Each converter gets the same 20 models with random weights. A row has the number of nodes, the
number of ``Cast`` nodes, the bytes and the seconds of a file, and the error of its outputs against
the model in float64, computed node by node with the roundings of the graph. Models are those of
timm, transformers, diffusers and torch. Converters that are not installed are left out: AutoCast
(``nvidia-modelopt[onnx]``) and ``onnxconverter-common``.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import itertools
import json
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch
from torch import nn

import amp_fx
from amp_fx.dtypes import dtype_name
from tests.exporting import onnx_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    Case = tuple[nn.Module, tuple[Any, ...]]

OPSET = 22
DTYPES = (torch.float16, torch.bfloat16)


class First(nn.Module):
    """A model whose only output is the first tensor that it returns."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.model, self.settings = model, settings

    def forward(self, x: Tensor) -> Tensor:
        """Returns the first output."""
        result: Tensor = self.model(x, **self.settings)[0]
        return result


def _timm(name: str, size: int = 64, **settings: Any) -> Case:
    timm = importlib.import_module("timm")
    return timm.create_model(name, num_classes=16, **settings), (torch.randn(1, 3, size, size),)


def _transformers(kind: str, x: Tensor, call: dict[str, Any], **config: Any) -> Case:
    transformers = importlib.import_module("transformers")
    model_class = getattr(transformers, kind)
    return First(model_class(model_class.config_class(**config)), **call), (x,)


def _tokens() -> Tensor:
    return torch.randint(100, (1, 16))


def _whisper() -> Case:
    transformers = importlib.import_module("transformers")
    sizes = {"d_model": 64, "encoder_layers": 2, "encoder_ffn_dim": 128}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.WhisperConfig(max_source_positions=50, **sizes, **heads)
    model = transformers.WhisperModel(config).get_encoder()
    return First(model, return_dict=False), (torch.randn(1, config.num_mel_bins, 100),)


def _rt_detr() -> Case:
    transformers = importlib.import_module("transformers")
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = transformers.RTDetrConfig(
        backbone_config=backbone,
        encoder_hidden_dim=32,
        encoder_in_channels=[32, 48, 64],
        feat_strides=[8, 16, 32],
        encoder_ffn_dim=64,
        encoder_attention_heads=2,
        d_model=32,
        decoder_in_channels=[32, 32, 32],
        decoder_ffn_dim=64,
        decoder_layers=2,
        decoder_attention_heads=2,
        num_queries=20,
        num_labels=8,
    )
    model = transformers.RTDetrForObjectDetection(config)
    return First(model, return_dict=False), (torch.randn(1, 3, 64, 64),)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        diffusers = importlib.import_module("diffusers")
        self.model = diffusers.UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(32, 64),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=8,
            norm_num_groups=8,
        )

    def forward(self, x: Tensor, step: Tensor, context: Tensor) -> Tensor:
        result: Tensor = self.model(x, step, context, return_dict=False)[0]
        return result


def _unet() -> Case:
    return _UNet(), (torch.randn(1, 4, 16, 16), torch.tensor([7.0]), torch.randn(1, 5, 32))


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.lstm(x)[0])
        return result


def _encoder() -> Case:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(2, 16, 64),)


def _mlp() -> Case:
    layers = nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 16), nn.Softmax(-1)
    return nn.Sequential(*layers), (torch.randn(8, 64),)


_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
_PLAIN = {"return_dict": False}
_NO_CACHE = {"return_dict": False, "use_cache": False}

MODELS: dict[str, Callable[[], Case]] = {
    "resnet18": lambda: _timm("resnet18"),
    "mobilenetv3": lambda: _timm("mobilenetv3_small_050"),
    "mnasnet": lambda: _timm("mnasnet_small"),
    "regnety": lambda: _timm("regnety_002"),
    "convnext": lambda: _timm("convnext_atto", depths=(1, 1, 1, 1)),
    "vit (timm)": lambda: _timm("vit_tiny_patch16_224", img_size=64, depth=3),
    "mixer": lambda: _timm("mixer_s32_224", img_size=64),
    "pvt_v2": lambda: _timm("pvt_v2_b0"),
    "bert": lambda: _transformers("BertModel", _tokens(), _PLAIN, intermediate_size=128, **_SMALL),
    "gpt2": lambda: _transformers(
        "GPT2LMHeadModel", _tokens(), _NO_CACHE, n_embd=64, n_layer=2, n_head=4, vocab_size=100
    ),
    "llama": lambda: _transformers(
        "LlamaForCausalLM", _tokens(), _NO_CACHE, intermediate_size=128, **_SMALL
    ),
    "qwen3": lambda: _transformers(
        "Qwen3ForCausalLM",
        _tokens(),
        _NO_CACHE,
        intermediate_size=128,
        num_key_value_heads=2,
        head_dim=16,
        **_SMALL,
    ),
    "t5 encoder": lambda: _transformers(
        "T5EncoderModel",
        _tokens(),
        _PLAIN,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        vocab_size=100,
    ),
    "vit (transformers)": lambda: _transformers(
        "ViTModel",
        torch.randn(1, 3, 64, 64),
        _PLAIN,
        intermediate_size=128,
        image_size=64,
        **{k: v for k, v in _SMALL.items() if k != "vocab_size"},
    ),
    "whisper encoder": _whisper,
    "rt-detr": _rt_detr,
    "unet": _unet,
    "lstm": lambda: (_Lstm(), (torch.randn(2, 12, 32),)),
    "encoder": _encoder,
    "mlp": _mlp,
}


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; returns 1 if a file of amp_fx is not valid."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.typed_onnx", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {', '.join(MODELS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows to FILE")
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.backends.mha.set_fastpath_enabled(False)
    rows = []
    for name in args.models or MODELS:
        for row in _rows(name):
            rows.append({"model": name, **row})
            sys.stdout.write(_text(rows[-1]) + "\n")
            sys.stdout.flush()
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["by"].startswith("amp_fx") and row.get("failure") for row in rows))


def _text(row: dict[str, Any]) -> str:
    head = f"{row['model']:<18} {row['dtype']:<8} {row['by']:<20} {row.get('lists', ''):<4}"
    if row.get("failure"):
        return f"{head} {row['failure']}"
    return (
        f"{head} {row['nodes']:>5} nodes {row['casts']:>4} casts {row['bytes'] / 1e3:>8.0f} KB "
        f"{row['seconds']:>6.1f} s  error {row['error']:.2e}  "
        f"{row.get('program', '')}  {row.get('file', '')}"
    )


def _rows(name: str) -> Iterator[dict[str, Any]]:
    torch.manual_seed(1234)
    model, inputs = MODELS[name]()
    _randomize(model.eval())
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(*[_double(x) for x in inputs])
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base.onnx"
        for dtype, (lists, folds) in itertools.product(DTYPES, _settings(model)):
            row = _measured(
                Path(folder) / "ours.onnx",
                functools.partial(_ours, model, inputs, lists, dtype, folds),
                inputs,
                exact,
            )
            program, found = row.pop("result", None), row.pop("outputs", None)
            if found is not None:
                row["file"] = _difference(found, program)
                is_eager = lists == "cpu" and not folds
                eager = _eager(model, inputs, dtype) if is_eager else None
                row["program"] = "" if eager is None else _difference(program, eager.float())
            by = "amp_fx, folded" if folds else "amp_fx"
            yield {"by": by, "lists": lists, "dtype": dtype_name(dtype), **row}
        with torch.no_grad():  # torch.onnx cannot export the T5 encoder with gradients on
            settings: dict[str, Any] = {"dynamo": True, "verbose": False, "opset_version": OPSET}
            torch.onnx.export(model, inputs, base, external_data=False, **settings)
        for by, (dtypes, convert) in CONVERTERS.items():
            for dtype in dtypes:
                row = _measured(
                    Path(folder) / "theirs.onnx",
                    functools.partial(convert, base, dtype),
                    inputs,
                    exact,
                )
                row.pop("outputs", None)
                yield {"by": by, "dtype": dtype_name(dtype), **row}


def _settings(model: nn.Module) -> Sequence[tuple[str, bool]]:
    """Returns the lists of ops, and whether batch norms are folded, of each file of amp_fx."""
    has_norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    return [("cpu", False), ("cuda", False), *([("cuda", True)] if has_norms else [])]


def _randomize(model: nn.Module) -> None:
    """Gives batch norms statistics, and weights that are zero other numbers."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.uniform_(-0.2, 0.2)
            module.running_var.uniform_(0.5, 2)
            with torch.no_grad():
                module.weight.uniform_(0.5, 1.5)


def _double(x: Any) -> Any:
    return x.double() if x.is_floating_point() else x


def _ours(
    model: nn.Module,
    inputs: tuple[Any, ...],
    lists: str,
    dtype: torch.dtype,
    folds: bool,
    path: Path,
) -> Tensor:
    program = amp_fx.export(model, inputs, device_type=lists, dtype=dtype, fold_batch_norm=folds)
    amp_fx.to_onnx(program, path, target="tensorrt")
    with torch.no_grad():  # attention has another kernel if its mask requires gradients
        result: Tensor = program.module()(*inputs)
    return result


def _eager(model: nn.Module, inputs: tuple[Any, ...], dtype: torch.dtype) -> Tensor | None:
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype):
            result: Tensor = model(*inputs)
    except RuntimeError:  # oneDNN has no LSTM in float16
        return None
    return result


def _measured(
    path: Path, convert: Callable[[Path], Any], inputs: tuple[Any, ...], exact: Tensor
) -> dict[str, Any]:
    """Returns the row of one file, or the reason why there is none."""
    start = time.perf_counter()
    row: dict[str, Any] = {}
    try:
        row["result"] = convert(path)
        row["seconds"] = time.perf_counter() - start
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        [outputs] = onnx_nodes.run(model, *inputs)
    except Exception as error:  # noqa: BLE001 - any converter may raise any exception
        lines = str(error).strip().splitlines()
        return {"failure": f"{type(error).__name__}: {lines[0][:120] if lines else ''}"}
    row["outputs"] = outputs
    row["nodes"] = len(model.graph.node)
    row["casts"] = sum(node.op_type == "Cast" for node in model.graph.node)
    row["bytes"] = path.stat().st_size
    row["error"] = _error(outputs, exact)
    if row["result"] is None:
        del row["result"]
    return row


def _error(found: Tensor, exact: Tensor) -> float:
    """Returns the root mean square of an error, relative to that of the exact result."""
    return float((found.double() - exact).norm() / exact.norm())


def _difference(found: Tensor, expected: Tensor) -> str:
    """Returns how far a result is from another one."""
    if found.equal(expected):
        return "same bits"
    return f"{_error(found, expected.double()):.1e}"


def _autocast(base: Path, dtype: torch.dtype, path: Path) -> None:
    autocast = importlib.import_module("modelopt.onnx.autocast")
    kind = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    model = autocast.convert_to_mixed_precision(
        onnx_path=str(base), low_precision_type=kind, keep_io_types=True
    )
    onnx.save(model, path)


def _converter_common(base: Path, _: torch.dtype, path: Path) -> None:
    float16 = importlib.import_module("onnxconverter_common.float16")
    onnx.save(float16.convert_float_to_float16(onnx.load(base), keep_io_types=True), path)


CONVERTERS: dict[str, tuple[Sequence[torch.dtype], Callable[[Path, torch.dtype, Path], None]]] = {
    "AutoCast": (DTYPES, _autocast),
    "onnxconverter-common": ((torch.float16,), _converter_common),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
