"""lm-eval with our models: `python -m optimus_compiler.lm_eval --model optimus --model_args source=run --tasks piqa`.

Everything after the module's name is lm-eval's own command line. In Python, importing this module is enough for
`lm_eval.simple_evaluate(model="optimus", model_args={"source": "run"}, ...)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval.models  # noqa: F401  (registers lm-eval's own, which it does not do once another is there)
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from optimus_compiler import processes
from optimus_compiler.mesh import Mesh
from optimus_compiler.runtime.evaluate.encode import row_of
from optimus_compiler.runtime.evaluate.open import open_model
from optimus_compiler.runtime.evaluate.score import score

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

NEW_TOKENS = 256  # lm-eval's own default


@register_model("optimus")
class OptimusLM(TemplateLM):
    """A checkpoint, a run or a Hugging Face folder as lm-eval sees a model.

    The device and the batches are chosen as `optimus evaluate` chooses them.
    """

    def __init__(
        self,
        source: str,
        tokenizer: str | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
        device: object = None,
    ) -> None:
        """source: RUN/checkpoints/step-N, RUN or a Hugging Face folder; tokenizer: a tokenizer.json in place of its.

        batch_size, max_batch_size, device: what lm-eval gives every model, and which changes nothing here.
        """
        super().__init__()
        if processes.world_size() > 1:
            raise ValueError("lm-eval runs in one process here: use `optimus evaluate` to divide questions over many")
        self._subject = open_model(Path(source), Mesh(), tokenizer=None if tokenizer is None else Path(tokenizer))
        self._model = self._subject.model

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, and stands before one without context."""
        return self._subject.eos_id

    @property
    def max_length(self) -> int:
        """Most tokens that the model reads at once."""
        return self._model.max_length

    @property
    def tokenizer_name(self) -> str:
        """By which lm-eval tells cached requests apart."""
        return str(self._subject.source)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids without special tokens: OLMoE's tokenizer has none before a text."""
        return self._subject.tokenize(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], **_lm_evals_own: Any
    ) -> list[tuple[float, bool]]:
        rows = [
            row_of(context or [self.prefix_token_id], continuation, self.max_length)
            for _, context, continuation in requests
        ]
        found = score(self._model, rows)
        for (texts, _, _), likelihood in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, likelihood)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of each text: its log-likelihood, in windows of max_length tokens that predict each token once."""
        sums = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = self._loglikelihood_tokens([(None, *make_disjoint_window(window)) for window in windows])
            sums.append(sum(likelihood for likelihood, _ in parts))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, sums[-1])
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Of each context its likeliest continuation, token by token, until one of the stop texts or the end."""
        texts = []
        for request in requests:
            context, settings = request.args
            if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
                raise ValueError("optimus generates the likeliest tokens only: set do_sample=False in gen_kwargs")
            until = settings.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            texts.append(self._continue(context, stops, int(settings.get("max_gen_toks", NEW_TOKENS))))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    @torch.no_grad()
    def _continue(self, context: str, stops: list[str], count: int) -> str:
        ids = self.tok_encode(context) or [self.prefix_token_id]
        new: list[int] = []
        text = ""
        while len(new) < count:
            ids_BS = torch.tensor([[*ids, *new][-self.max_length :]], device=self._model.mesh.device)
            chosen = int(self._model.module(ids_BS).logits[0, -1].argmax())
            if chosen == self.eot_token_id:
                break
            new.append(chosen)
            text = self._subject.detokenize(new)
            ends = [text.index(stop) for stop in stops if stop and stop in text]
            if ends:
                return text[: min(ends)]
        return text


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
