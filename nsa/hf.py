"""Hugging Face: a configuration, a cache and a causal language model for `transformers`.

`import nsa.hf` registers the configuration and the model, so that
`AutoModelForCausalLM.from_pretrained` reads the directories of `nsa.save_model`.
"""

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from nsa.directory import MODEL_TYPE, model_config
from nsa.generate import next_logits
from nsa.model import Transformer


class NSAModelConfig(transformers.PreTrainedConfig):
    """A `ModelConfig` for Hugging Face's tools: `model` has its fields as plain data.

    Raises ValueError if these fields do not describe a model.
    """

    model_type = MODEL_TYPE

    def __init__(self, model: dict[str, Any] | None = None, **others: Any) -> None:
        super().__init__(**others)
        self.model, self.vocab_size = model, model_config(model).vocab_size
        self.tie_word_embeddings = False


class NSACache:
    """The decoding caches of a batch whose rows are padded on the left.

    Rows with the same padding share their caches, and are computed together, without the padding.
    So each row has the same positions, blocks and windows as if it were alone. `padding` is the
    number of padded tokens of each row; `columns` is the number of tokens of a row, with its
    padding.
    """

    is_compileable = is_croppable = False

    def __init__(self, model: Transformer, padding: list[int]) -> None:
        self.padding, self.columns = padding, 0
        self.caches = {pad: model.caches() for pad in sorted(set(padding))}

    def rows(self, pad: int) -> list[int]:
        """Returns the rows of the batch with this padding."""
        return [row for row, each in enumerate(self.padding) if each == pad]

    def get_seq_length(self) -> int:
        """Returns the number of tokens of a row, with its padding."""
        return self.columns


def left_padding(mask: Tensor, batch: int, columns: int) -> list[int]:
    """Returns the number of padded tokens of each row of a mask `[B, columns]`.

    Raises ValueError for another shape, for a zero after a one, and for a row without a one.
    """
    real = mask.bool()
    ascending = (real[..., :-1] <= real[..., 1:]).all() & real[..., -1].all()
    if mask.shape != (batch, columns) or not bool(ascending):
        raise ValueError(
            f"attention_mask must be [{batch}, {columns}], 0 for padding on the left and 1 for all "
            "tokens after it; pad with padding_side='left'."
        )
    return (columns - real.sum(1)).tolist()


class NSAForCausalLM(transformers.PreTrainedModel, transformers.GenerationMixin):
    """`Transformer` as a causal language model of Hugging Face."""

    config_class = NSAModelConfig
    base_model_prefix = "model"
    _input_embed_layer = "embed"
    _is_stateful = True  # the cache cannot drop its last tokens

    def __init__(self, config: NSAModelConfig) -> None:
        super().__init__(config)
        self.model = Transformer(model_config(config.model))
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes the cache

    def init_weights(self) -> None:
        """Initialises no weights, because `Transformer` has already done so."""
        self.tie_weights(recompute_mapping=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.model.head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **others: Any) -> nn.Embedding:
        raise NotImplementedError("nsa.hf cannot change the size of the vocabulary.")

    def _init_weights(self, module: nn.Module) -> None:
        for name, weight in module.named_parameters(recurse=False):
            if not getattr(weight, "_is_hf_initialized", False):
                raise ValueError(f"a {name} of {type(module).__name__} is missing in the directory")

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None,
        past_key_values: NSACache | None = None, labels: Tensor | None = None,
        use_cache: bool = False, logits_to_keep: int = 0, return_dict: bool = True,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:  # fmt: skip
        """int64 `[B, S]` → logits `[B, S, V]`.

        If `logits_to_keep` is not 0, only the logits of this number of last tokens are returned.
        `attention_mask` `[B, T]` is 0 for padding on the left. Its columns are the cached tokens
        and then the new tokens. The logits of padding are 0. The tokens follow those in
        `past_key_values`; without a cache, `use_cache` makes a new cache. With `labels` `[B, S]`,
        the result has the mean loss of the next tokens, without padding and labels of -100. A mask
        on a GPU is read only without a cache, because reading it waits for the device. Raises
        ValueError for a cache of another kind or batch, for a mask that is read and invalid, and
        for labels without the logits of all tokens.
        """
        batch, count = input_ids.shape
        cache = past_key_values
        if not isinstance(cache, NSACache | None):
            raise ValueError(f"past_key_values must be an NSACache, not a {type(cache).__name__}.")
        columns = count + (cache.columns if cache else 0)
        padding = cache.padding if cache else [0] * batch
        if attention_mask is not None and (cache is None or attention_mask.device.type == "cpu"):
            # With a cache on a GPU, the host would wait for the device at each decoded token.
            padding = left_padding(attention_mask, batch, columns)
        cache = cache or NSACache(self.model, padding)
        if padding != cache.padding or len(padding) != batch:
            raise ValueError("past_key_values is of a batch with other rows or other padding.")
        kept, parts, order = min(logits_to_keep or count, count), [], []
        if labels is not None and kept < count:
            raise ValueError("labels need the logits of all tokens; leave logits_to_keep at 0.")
        for pad, caches in cache.caches.items():
            rows = cache.rows(pad)
            tokens = input_ids if len(cache.caches) == 1 else input_ids[rows]
            tokens = tokens[:, max(pad - cache.columns, 0) :]
            if not (use_cache or past_key_values):
                part = self.model(tokens)[:, -kept:]
            elif kept == 1:
                part = next_logits(self.model, tokens, caches)
            else:
                part = self.model(tokens, caches)[:, -kept:]
            hidden = kept - part.shape[1]
            parts.append(F.pad(part, (0, 0, hidden, 0)) if hidden else part)
            order += rows
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)[torch.tensor(order).argsort()]
        cache.columns = columns
        loss = None
        if labels is not None:  # no token precedes the first token after padding
            column = torch.arange(columns - count, columns, device=labels.device)
            padded = column <= torch.tensor(padding, device=labels.device)[:, None]
            labels = labels.masked_fill(padded, -100)
            loss = self.loss_function(logits, labels, self.config.vocab_size)
        used: Any = cache if use_cache or past_key_values else None
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=used)
        return output if return_dict else output.to_tuple()


transformers.AutoConfig.register(MODEL_TYPE, NSAModelConfig)
transformers.AutoModelForCausalLM.register(NSAModelConfig, NSAForCausalLM)
