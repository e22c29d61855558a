"""Argument parsers of the commands, which do not import torch so that ``--help`` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from amp_fx.tables import DEVICES

if TYPE_CHECKING:
    import argparse

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

PICTURES = ".svg, .pdf, .png, .dot, .html"
OUTPUT_DTYPES = ("original", "autocast")
WEIGHTS = ("low", "float32")
TARGETS = ("onnxruntime", "tensorrt")
PRESETS = (
    "torch",
    "ipex",
    "lean",
    "router",
    "head",
    "float8-tensorwise",
    "float8-rowwise",
    "float8-rowwise-gw-hp",
)

_EXPLAIN = """\
examples:
  python -m amp_fx explain torch.nn.functional:softmax --input-shape 4,8
  python -m amp_fx explain mypackage.models:make_model --input-shape 8,3,224,224
  python -m amp_fx explain mypackage.models:GPT --input-shape 2,64:int64 --html gpt.html
  python -m amp_fx explain mypackage.models:GPT --meta --device cuda --dtype float16 --json

The target is a module, a module class or a function. A class or function without required
arguments is called as a factory: it returns the model, or the model and a tuple of its inputs.
"""


def add_explain(subparsers: Subparsers) -> None:
    """Adds the parser of ``explain``."""
    parser = subparsers.add_parser(
        "explain",
        help="show what amp_fx does to a model: casts, dtypes, reasons",
        description="Shows what amp_fx does to a model, without compiling or running it.",
    )
    _add_target(parser, "of a model, function or factory")
    parser.add_argument("--dtype", help="bfloat16 or float16; default: depends on the device")
    parser.add_argument("--policy", help="name of a preset; default: torch")
    parser.add_argument("--device", help="device type to explain for; it may be missing")
    parser.add_argument("--meta", action="store_true", help="create the model on the meta device")
    parser.add_argument("--backward", action="store_true", help="explain the backward as well")
    parser.add_argument("--all", action="store_true", help="include views in the table")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--html", metavar="PATH", help="write a page with the picture and the table"
    )
    parser.add_argument("--draw", metavar="PATH", help=f"write a picture: {PICTURES}")
    parser.add_argument("--dpi", type=int, default=192, help="resolution of a .png; default: 192")
    parser.add_argument("--depth", type=int, help="levels of modules in the picture")
    parser.add_argument("--focus", metavar="MODULE", help="draw only this module: layers.3.attn")


def _add_target(parser: argparse.ArgumentParser, description: str) -> None:
    """Adds the arguments for a model and its inputs."""
    parser.add_argument("target", help=f"package.module:name {description}")
    parser.add_argument(
        "--input-shape",
        action="append",
        default=[],
        metavar="SHAPE",
        help="shape of the next input: 8,64 (float32) or, with a dtype, 2,32:int64 (token ids); "
        "repeat for each input",
    )


_EXPORT = """\
examples:
  python -m amp_fx export mypackage.models:make_model --input-shape 8,3,224,224 model.pt2
  python -m amp_fx export mypackage.models:GPT --input-shape 2,64:int64 --package gpt.pt2
  python -m amp_fx export mypackage.models:GPT --input-shape 2,64:int64 --dynamic 1 gpt.onnx
  python -m amp_fx export mypackage.models:make_model --input-shape 8,3,224,224 \\
      --target tensorrt --dtype float16 model.onnx

The target is a module or a module class. A class or function without required arguments is called
as a factory: it returns the model, or the model and a tuple of its inputs. The model is switched to
evaluation mode.
"""


def add_export(subparsers: Subparsers) -> None:
    """Adds the parser of ``export``."""
    parser = subparsers.add_parser(
        "export",
        help="write a model in mixed precision to a file: torch.export, AOTInductor, ONNX",
        description="Exports a model in mixed precision, with weights in low precision.",
    )
    _add_target(parser, "of a model or factory")
    parser.add_argument("out", type=Path, help="the file: .pt2 (torch.export.load) or .onnx")
    parser.add_argument(
        "--device-type", help="the device type to export for, such as cuda, which may be missing"
    )
    parser.add_argument(
        "--target",
        dest="runtime",
        choices=TARGETS,
        help="the runtime of an ONNX file; tensorrt implies --device-type cuda",
    )
    parser.add_argument("--dtype", help="bfloat16 or float16; default: depends on the device")
    parser.add_argument("--policy", default="torch", help="name of a preset, or a policy file")
    parser.add_argument("--output-dtype", choices=OUTPUT_DTYPES, default="original")
    parser.add_argument("--weights", choices=WEIGHTS, default="low")
    parser.add_argument(
        "--dynamic",
        type=int,
        action="append",
        default=[],
        metavar="DIM",
        help="a dimension of all inputs with a dynamic size, such as 0 for the batch",
    )
    parser.add_argument("--strict", action="store_true", help="capture with Dynamo")
    parser.add_argument(
        "--fold-batch-norm", action="store_true", help="fold batch norms into convolutions"
    )
    parser.add_argument(
        "--package",
        action="store_true",
        help="compile with AOTInductor, for torch._inductor.aoti_load_package and C++",
    )


_ACCURACY = """\
examples:
  python -m amp_fx accuracy mypackage.train:make_step --dtype float16
  python -m amp_fx accuracy torch.nn.functional:gelu --input-shape 8,64 --dtype bfloat16
  python -m amp_fx accuracy mypackage.train:make_step --search 1e-2 --save amp.toml
  python -m amp_fx accuracy mypackage.train:make_step --policy float8-rowwise --search 0.05

The target is a module, a module class or a function. A class or function without required
arguments is called as a factory: it returns the step, or the step and a tuple of its inputs.
Inputs of --input-shape are random numbers; integers are zeros.
"""


def add_accuracy(subparsers: Subparsers) -> None:
    """Adds the parser of ``accuracy``."""
    parser = subparsers.add_parser(
        "accuracy",
        help="find ops that lose accuracy in low precision, and a policy that fixes them",
        description="Runs a step in low precision with a float32 shadow, forward and backward.",
    )
    _add_step(parser)
    parser.add_argument("--dtype", help="bfloat16 or float16; default: autocast's")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the loss")
    parser.add_argument("--modules", action="append", help="only examine these modules: 'h.3'")
    parser.add_argument(
        "--search",
        type=float,
        metavar="TOLERANCE",
        help="find a small set of ops that must run in float32 (for float8 products: in the low "
        "dtype) to reduce the error below this",
    )
    parser.add_argument("--budget", type=int, default=60, help="maximum runs of the search")
    parser.add_argument("--save", metavar="PATH", help="write the policy of the search: amp.toml")


def _add_step(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for a step and its inputs."""
    _add_target(parser, "of a step or factory")
    parser.add_argument("--policy", help="name of a preset or a policy file; default: torch")
    parser.add_argument("--seed", type=int, default=0, help="seed of inputs and random numbers")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


_AUDIT = """\
examples:
  python -m amp_fx audit mypackage.train:make_step
  python -m amp_fx audit mypackage.train:make_step --markdown >> "$GITHUB_STEP_SUMMARY"
  python -m amp_fx audit mypackage.models:make_loss --optimizer AdamW --json

The target is a function that returns a training step, or the step and a tuple of its inputs. A step
calls backward and the optimizer, or it returns the loss.
"""


def add_audit(subparsers: Subparsers) -> None:
    """Adds the parser of ``audit``."""
    parser = subparsers.add_parser(
        "audit",
        help="show the precision of a training step, and losses of accuracy",
        description="Runs one training step and shows lost updates, low sums and useless casts.",
    )
    _add_target(parser, "of a training step or factory")
    parser.add_argument("--seed", type=int, default=0, help="seed of inputs and random numbers")
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help="optimizer to step after the backward: a class of torch.optim, with its defaults",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of the table")
    form.add_argument("--markdown", action="store_true", help="print Markdown, for a pull request")


_VERIFY = """\
examples:
  python -m amp_fx verify mypackage.models:make_net
  python -m amp_fx verify torch.nn:Tanh --input-shape 8,64 --option numerics=eager
  python -m amp_fx verify mypackage.models:make_net --optimizer AdamW --steps 2

The target is the same as for accuracy.
"""


def add_verify(subparsers: Subparsers) -> None:
    """Adds the parser of ``verify``."""
    parser = subparsers.add_parser(
        "verify",
        help="compare a compiled program with eager autocast, bit for bit",
        description="Shows the first node that differs, the reason, and options that fix it.",
    )
    _add_step(parser)
    parser.add_argument("--dtype", help="bfloat16 or float16; default: autocast's")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the backend, such as numerics=eager or freezing=false",
    )
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help="optimizer whose steps are compared: a class of torch.optim, with its defaults",
    )
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps; default: 3")


_DIFF = """\
examples:
  python -m amp_fx diff a.trace b.trace
  python -m amp_fx diff a.trace b.trace --json

Write the files by amp_fx.record(step, "a.trace")(*inputs), with the same weights and inputs.
"""


def add_diff(subparsers: Subparsers) -> None:
    """Adds ``diff`` and its options to the command line."""
    parser = subparsers.add_parser(
        "diff",
        help="show where two recorded runs first differ, and which op amplifies it",
        description="Compares two files of amp_fx.record, of two machines or torch versions. The "
        "exit code is 1 if a result differs.",
    )
    parser.add_argument("before", type=Path, help="the file to compare with")
    parser.add_argument("after", type=Path, help="the other file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


_CONFORMANCE = """\
examples:
  python -m amp_fx conformance cpu
  python -m amp_fx conformance my_device --import my_device
  python -m amp_fx conformance my_device --import my_device --dtype bfloat16 --json

The exit code is 1 if the device does not conform.
"""


def add_conformance(subparsers: Subparsers) -> None:
    """Adds the parser of ``conformance``."""
    parser = subparsers.add_parser(
        "conformance",
        help="check the autocast of a new device",
        description="Compares the autocast of an installed device with a policy, op by op, and\n"
        "checks regions, custom functions, checkpoints, gradients and GradScaler.",
    )
    parser.add_argument("device", help="device type, such as cuda or the name of a new device")
    _add_imports(parser)
    parser.add_argument(
        "--dtype",
        action="append",
        help="bfloat16 or float16; repeat for several; default: those that the device supports",
    )
    parser.add_argument(
        "--policy",
        default="torch",
        help="name of a preset or a policy file, with the lists of the device; default: torch",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def _add_imports(parser: argparse.ArgumentParser) -> None:
    """Adds the argument for packages of devices."""
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="the device's package, if torch does not import it by itself; may be repeated",
    )


POLICY_EXAMPLES = """\
examples:
  python -m amp_fx policy                       every op with a policy, by device
  python -m amp_fx policy --device cuda         on one device type
  python -m amp_fx policy softmax               one op, on every device type
  python -m amp_fx policy aten::linalg_matrix_norm.str_ord
  python -m amp_fx policy torch.nn.functional.layer_norm --device cpu
  python -m amp_fx policy --preset ipex         the lists of Intel Extension for PyTorch
  python -m amp_fx policy cholesky --preset torch-2.13
"""


def add_policy(subparsers: Subparsers) -> None:
    """Adds the parser of ``policy``."""
    parser = subparsers.add_parser(
        "policy",
        help="show the dtypes of ops under autocast",
        description="Shows the cast policy of ops under autocast for each device type.\n"
        "float64, integer, bool and complex tensors are never cast; in-place calls and\n"
        "calls with out= are not changed.",
    )
    parser.add_argument("op", nargs="?", help="one op: softmax, aten::softmax.int, F.softmax")
    parser.add_argument(
        "--device", action="append", choices=DEVICES, help="only this device type; may be repeated"
    )
    parser.add_argument(
        "--preset",
        default="torch",
        help=f"{', '.join(PRESETS)}, the lists of another torch (torch-2.13), or a policy file "
        "(*.toml); default: %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--cpp",
        metavar="DEVICE",
        help="print C++ that registers the lists of a new device: its table, or else the lists "
        "that torch provides for new devices",
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="instead, compare C++ in a file with --cpp; the exit code is 1 if lists differ",
    )
    _add_imports(parser)


_BUILD = """\
examples:
  python -m amp_fx build                                 in inductor's cache folder
  AMP_FX_CACHE_DIR=/opt/amp_fx python -m amp_fx build    in another folder

In an image, set the variable for all programs; they only read the folder:
  ENV AMP_FX_CACHE_DIR=/opt/amp_fx
  RUN python -m amp_fx build
"""


def add_build(subparsers: Subparsers) -> None:
    """Adds the parser of ``build``."""
    subparsers.add_parser(
        "build",
        help="build the C++ extension ahead of time, for example in an image",
        description="Builds the C++ extension of amp_fx, which the first call of a model would\n"
        "otherwise build. All processes with the same Python and torch share it.\n"
        "AMP_FX_CACHE_DIR sets the folder.",
    )


def add_env(subparsers: Subparsers) -> None:
    """Adds the parser of ``env``."""
    subparsers.add_parser(
        "env",
        help="show versions, devices and tools, for bug reports",
        description="Shows versions, devices and tools.",
    )


ADD = {
    "explain": (add_explain, _EXPLAIN),
    "export": (add_export, _EXPORT),
    "accuracy": (add_accuracy, _ACCURACY),
    "audit": (add_audit, _AUDIT),
    "verify": (add_verify, _VERIFY),
    "diff": (add_diff, _DIFF),
    "conformance": (add_conformance, _CONFORMANCE),
    "policy": (add_policy, POLICY_EXAMPLES),
    "build": (add_build, _BUILD),
    "env": (add_env, ""),
}
"""For each command, the function that adds its parser, and its examples."""
