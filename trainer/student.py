"""The student: a Hugging Face causal LM whose head is kept apart from its body.

Shapes: B sequences, T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..format_spec import Manifest, TokenizerError
from ..format_spec.tokenizer_identity import TOKENIZER_FILES, tokenizer_digest
from .errors import TokenizerMismatch, UnsupportedStudent

HEAD_TOLERANCE = 1e-3
# what configs call factors of the logits: Cohere, Falcon-H1; Granite
MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling",)


@dataclass(frozen=True, eq=False)
class Student:
    """A causal LM, and the folder or hub name it was loaded from."""

    model: Any
    source: Path

    @classmethod
    def load(cls, name: str, *, device: str, keep_layers: Sequence[int] | None = None) -> Student:
        """Load a student in float32 from a folder or the hub, pruned to `keep_layers` where given.

        Raises:
            UnsupportedStudent: it cannot be loaded, pruned, or its logits are not hidden states times head.
        """
        from transformers import AutoModelForCausalLM

        source = _resolve(name)
        model: Any
        try:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, use_safetensors=True)
        except (OSError, ValueError) as error:
            raise UnsupportedStudent(f"cannot load {name} as a causal LM: {str(error).splitlines()[0]}") from error
        if keep_layers is not None:
            model = prune(model, keep_layers)
        model.config.use_cache = False
        student = cls(model.to(device), source)
        student.check_head()
        return student

    @property
    def head(self) -> nn.Linear:
        """The head, with its bias where it has one."""
        head: nn.Linear = self.model.get_output_embeddings()
        return head

    @property
    def head_VH(self) -> Tensor:
        """The head's weight."""
        return self.head.weight

    @property
    def logit_scale(self) -> float:
        """What the model multiplies its logits by."""
        config = self.model.config.get_text_config()
        scale = 1.0
        for name in MULTIPLIERS:
            scale *= getattr(config, name, None) or 1.0
        for name in DIVISORS:
            scale /= getattr(config, name, None) or 1.0
        return float(scale)

    @property
    def softcap(self) -> float | None:
        """What the model then caps them at, by a tanh."""
        return getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)

    def hidden_BTH(self, input_ids_BT: Tensor) -> Tensor:
        """Return the hidden states that the head is applied to.

        Padding on the right needs no attention mask under a causal one: no real position sees it.
        """
        hidden: Tensor = self.model.base_model(input_ids=input_ids_BT, use_cache=False)[0]
        return hidden

    @torch.no_grad()
    def check_head(self) -> None:
        """Compare what the loss makes of hidden states and head with the model's own logits, on a few tokens.

        Raises:
            UnsupportedStudent: they differ.
        """
        head = self.head
        if not isinstance(head, nn.Linear):
            raise UnsupportedStudent(f"the head is a {type(head).__name__}, not a linear layer")
        ids_BT = torch.arange(8, device=head.weight.device)[None] % head.weight.shape[0]
        training = self.model.training
        self.model.eval()
        own = self.model(input_ids=ids_BT, use_cache=False).logits.float()
        ours = head(self.hidden_BTH(ids_BT)).float() * self.logit_scale
        if self.softcap is not None:
            ours = self.softcap * torch.tanh(ours / self.softcap)
        self.model.train(training)
        if own.shape != ours.shape or not torch.allclose(own, ours, rtol=HEAD_TOLERANCE, atol=HEAD_TOLERANCE):
            kind = type(self.model).__name__
            capped = "not capped" if self.softcap is None else f"capped at {self.softcap:g}"
            raise UnsupportedStudent(
                f"the logits of {kind} are not its last hidden states times its head, scaled by {self.logit_scale:g}"
                f" and {capped}: it does more to them than is known here"
            )

    def check_vocabulary(self, manifest: Manifest) -> None:
        """Refuse a cache whose token ids the student's head cannot name.

        Raises:
            UnsupportedStudent: the teacher's vocabulary is larger than the student's.
        """
        theirs, ours = manifest.fingerprint.vocab_size, self.head_VH.shape[0]
        if theirs > ours:
            raise UnsupportedStudent(f"the student's vocabulary of {ours} is smaller than the teacher's of {theirs}")

    def check_tokenizer(self, manifest: Manifest) -> None:
        """Compare the student's tokenizer with the one that the cache was made with.

        Raises:
            TokenizerMismatch: they differ, or the student has none.
        """
        theirs = manifest.fingerprint.tokenizer
        try:
            ours = tokenizer_digest(self.source)
        except TokenizerError as error:
            raise TokenizerMismatch(f"cannot compare tokenizers: {error}; copy the teacher's there") from error
        if ours != theirs:
            raise TokenizerMismatch(
                f"the cache was made with another tokenizer ({theirs[:19]}...) than the student's ({ours[:19]}...); "
                "use a student with the teacher's tokenizer"
            )

    def save(self, folder: Path) -> None:
        """Write the student and its tokenizer in Hugging Face form."""
        self.model.save_pretrained(folder)
        for name in (*TOKENIZER_FILES, "chat_template.jinja"):
            if (self.source / name).is_file():
                shutil.copyfile(self.source / name, folder / name)


def prune(model: Any, keep_layers: Sequence[int]) -> Any:
    """Return a new model with only these decoder layers of `model`, in this order, sharing no memory with it.

    Raises:
        UnsupportedStudent: a number that is no layer, or no list of decoder layers to be found.
    """
    depth = model.config.num_hidden_layers
    if not keep_layers or min(keep_layers) < 0 or max(keep_layers) >= depth:
        raise UnsupportedStudent(f"cannot keep layers {list(keep_layers)} of a model with layers 0 to {depth - 1}")
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if len(lists) != 1:
        raise UnsupportedStudent(f"cannot tell the decoder layers of {type(model).__name__} from {lists}")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(keep_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in keep_layers]
    state = {name: value for name, value in model.state_dict().items() if not name.startswith(f"{lists[0]}.")}
    for new, old in enumerate(keep_layers):
        prefix = f"{lists[0]}.{old}."
        for name, value in model.state_dict().items():
            if name.startswith(prefix):
                state[f"{lists[0]}.{new}.{name.removeprefix(prefix)}"] = value
    pruned = type(model)(config).to(dtype=model.dtype)
    pruned.load_state_dict(state)
    return pruned


def _resolve(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")):
        raise UnsupportedStudent(f"no folder {name}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UnsupportedStudent(f"{name} is neither a folder nor to be had from the hub: {error}") from error
