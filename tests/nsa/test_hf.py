"""The model in Hugging Face's `transformers`: the same logits and tokens, alone and in a batch."""

import json
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

import nsa
from nsa.generate import generate
from nsa.hf import NSAForCausalLM, NSAModelConfig
from tests.nsa.cases import model_config

MODELS = {"nsa": {}, "dense": {"attention": "dense"}}
LENGTHS = (40, 7, 40, 1, 23)


def both(path, kind):
    """Returns a `Transformer`, the same model read by Hugging Face, and its directory."""
    torch.manual_seed(0)
    ours = nsa.Transformer(model_config(n_layers=2, init_std=0.5, **MODELS[kind]))
    nsa.save_model(ours, path)
    return ours, AutoModelForCausalLM.from_pretrained(path), path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return both(tmp_path_factory.mktemp("nsa"), "nsa")


@pytest.fixture(scope="module")
def ragged():
    """Returns rows of different lengths, padded on the left, and their mask."""
    tokens = torch.randint(64, (len(LENGTHS), max(LENGTHS)), generator=torch.manual_seed(1))
    column = torch.arange(max(LENGTHS))
    mask = (column >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]).long()
    return tokens * mask, mask


@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_greedy_tokens_are_ours(kind, tmp_path):
    ours, theirs, _ = both(tmp_path, kind)
    tokens = torch.randint(64, (2, 50))
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens))
    count = 64 if kind == "nsa" else 8
    found = theirs.generate(tokens, max_new_tokens=count, do_sample=False)
    assert torch.equal(found[:, 50:], generate(ours, tokens, count))


def test_rows_padded_on_the_left_are_those_of_each_row_alone(models, ragged):
    _, theirs, _ = models
    tokens, mask = ragged
    logits = theirs(tokens, attention_mask=mask).logits
    together = theirs.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False)
    for row, length in enumerate(LENGTHS):
        alone = tokens[row : row + 1, -length:]
        torch.testing.assert_close(logits[row, -length:], theirs(alone).logits[0])
        assert not logits[row, :-length].any()
        found = theirs.generate(alone, max_new_tokens=12, do_sample=False)
        assert torch.equal(together[row, -12:], found[0, -12:])


def test_a_token_is_computed_once_and_a_returned_cache_goes_on(models, ragged):
    ours, theirs, _ = models
    tokens, mask = ragged
    computed = []
    hook = theirs.model.embed.register_forward_pre_hook(lambda _, args: computed.append(args[0]))
    first = theirs.generate(
        tokens, attention_mask=mask, max_new_tokens=5, do_sample=False, return_dict_in_generate=True
    )
    assert sum(each.numel() for each in computed) == sum(LENGTHS) + 4 * len(LENGTHS)
    mask = torch.nn.functional.pad(mask, (0, 5), value=1)
    more = theirs.generate(
        first.sequences, attention_mask=mask, max_new_tokens=5, do_sample=False,
        past_key_values=first.past_key_values,
    )  # fmt: skip
    hook.remove()
    assert sum(each.numel() for each in computed) == sum(LENGTHS) + 9 * len(LENGTHS)
    for row, length in enumerate(LENGTHS):
        found = generate(ours, tokens[row : row + 1, -length:], 10)
        assert torch.equal(more[row, -10:], found[0])


@pytest.mark.parametrize(
    "mask", [[[1, 1, 1, 0]], [[0, 1, 0, 1]], [[0, 0, 0, 0]], [[1, 1, 1]], [[[1, 1, 1, 1]]]]
)
def test_a_mask_with_other_padding_than_on_the_left_is_refused(models, mask):
    with pytest.raises(ValueError, match=r"attention_mask must be \[1, 4\]"):
        models[1](torch.zeros(1, 4, dtype=torch.long), attention_mask=torch.tensor(mask))


def test_other_caches_are_refused(models, ragged):
    _, theirs, _ = models
    tokens, mask = ragged
    with pytest.raises(ValueError, match="must be an NSACache, not a DynamicCache"):
        theirs(tokens, past_key_values=DynamicCache())
    with torch.no_grad():
        cache = theirs(tokens, attention_mask=mask, use_cache=True).past_key_values
    other = torch.ones(len(LENGTHS), max(LENGTHS) + 1, dtype=torch.long)
    for of_another in ({"input_ids": tokens[:, :1], "attention_mask": other},
                       {"input_ids": tokens[:2, :1]}):  # fmt: skip
        with pytest.raises(ValueError, match="a batch with other rows or other padding"):
            theirs(past_key_values=cache, **of_another)
    with pytest.raises(ValueError, match="not supported with stateful models"):
        theirs.generate(tokens, attention_mask=mask, prompt_lookup_num_tokens=2)


def test_the_loss_is_that_of_the_next_tokens_and_has_gradients(models, ragged):
    ours, theirs, _ = models
    tokens, mask = ragged
    theirs.zero_grad()
    out = theirs(tokens, attention_mask=mask, labels=tokens)
    out.loss.backward()
    nats = []
    for row, length in enumerate(LENGTHS):
        logits = ours(tokens[row : row + 1, -length:])[0].log_softmax(-1)
        nats += [-logits[i, tokens[row, i - length + 1]] for i in range(length - 1)]
    torch.testing.assert_close(out.loss, torch.stack(nats).mean())
    assert all(weight.grad is not None for weight in theirs.parameters())


def test_the_loss_of_a_second_piece_leaves_out_only_padding(models):
    ours, theirs, _ = models
    lengths, first = (8, 3), 6
    tokens = torch.arange(16).view(2, 8)
    mask = (torch.arange(8) >= torch.tensor([[8 - length] for length in lengths])).long()
    with torch.no_grad():
        begun = theirs(tokens[:, :first], attention_mask=mask[:, :first], use_cache=True)
        rest = theirs(
            tokens[:, first:], attention_mask=mask, labels=tokens[:, first:],
            past_key_values=begun.past_key_values,
        )  # fmt: skip
        nats = []
        for row, length in enumerate(lengths):
            logits = ours(tokens[row : row + 1, -length:])[0].log_softmax(-1)
            nats.append(-logits[-2, tokens[row, -1]])
    torch.testing.assert_close(rest.loss, torch.stack(nats).mean())


def test_labels_need_the_logits_of_all_tokens(models, ragged):
    tokens, _ = ragged
    with pytest.raises(ValueError, match="leave logits_to_keep at 0"):
        models[1](tokens, labels=tokens, logits_to_keep=2)


def test_beams_need_no_cache_and_a_vocabulary_keeps_its_size(models, ragged):
    ours, theirs, _ = models
    tokens, mask = ragged
    with pytest.raises(ValueError, match="cannot use beam search with a cache"):
        theirs.generate(tokens, attention_mask=mask, num_beams=3, max_new_tokens=4)
    found = theirs.generate(
        tokens[:1], num_beams=64, use_cache=False, max_new_tokens=2, do_sample=False
    )
    with torch.no_grad():
        first = ours(tokens[:1])[0, -1].log_softmax(-1)
        longer = torch.cat((tokens[:1].expand(64, -1), torch.arange(64)[:, None]), dim=1)
        both_tokens = first[:, None] + ours(longer)[:, -1].log_softmax(-1)
    assert found[0, -2:].tolist() == list(divmod(int(both_tokens.argmax()), 64))
    with pytest.raises(NotImplementedError, match="size of the vocabulary"):
        theirs.resize_token_embeddings(70)
    assert theirs.get_output_embeddings() is theirs.model.head


def test_a_decoded_token_reads_no_mask_on_a_device_that_waits(tmp_path):
    """A meta tensor has no values, so code that reads a value, and would wait for a GPU, fails."""
    model = both(tmp_path, "nsa")[1]
    tokens, mask = torch.zeros(2, 9, dtype=torch.long), torch.ones(2, 9, dtype=torch.long)
    with torch.no_grad():
        cache = model(tokens[:, :8], attention_mask=mask[:, :8], use_cache=True).past_key_values
        expected = model(tokens).logits[:, -1:]
        found = model(tokens[:, 8:], attention_mask=mask.to("meta"), past_key_values=cache).logits
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_was_saved_there_is_read_here(kind, tmp_path):
    ours, theirs, _ = both(tmp_path / "first", kind)
    theirs.save_pretrained(tmp_path)
    again = nsa.load_model(tmp_path).state_dict()
    assert again.keys() == ours.state_dict().keys()
    assert all(torch.equal(again[name], weight) for name, weight in ours.state_dict().items())


def test_a_new_model_has_our_initial_weights():
    """The usual initial weights of Hugging Face have another deviation."""
    config = model_config(n_layers=8, dim=64, init_std=0.5)
    made = NSAForCausalLM(NSAModelConfig(model=asdict(config)))
    assert made.model.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.5 / 4, rel=0.1)


def test_a_directory_that_lacks_a_weight_or_a_field_is_refused(models, tmp_path):
    _, _, path = models
    weights = load_file(path / "model.safetensors")
    del weights["norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    with pytest.raises(ValueError, match="a weight of RMSNorm is missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["model"]["nsa"]["window"] = "wide"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="window must be a positive int; got 'wide'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
