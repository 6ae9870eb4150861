"""Chat templates: prompts, completions, the token that ends a response, and text from tokens."""

from grafting.errors import UserError


def _render(tokenizer, messages: list[dict], prompt: bool, example: str | None) -> str:
    """Text of the conversation by the tokenizer's chat template; with the start of an answer if `prompt`."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UserError(
            f"{_name(example)}the tokenizer has no chat template (chat_template.jinja); copy it from the deployed model"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except TemplateError as error:
        raise UserError(f"{_name(example)}the chat template refuses these messages: {error}") from None


def _name(example: str | None) -> str:
    return f"example {example}: " if example else ""


def _tokens(tokenizer, text: str, example: str | None) -> list[int]:
    """Token ids of rendered text; the template writes special tokens itself, so none are added."""
    try:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # a bare Exception is raised for a word outside the vocabulary
        words = [w for w in text.split() if w not in tokenizer.get_vocab()]
        raise UserError(f"{_name(example)}cannot be tokenised ({error}); unknown words: {words[:5]}") from None


def _one_bos(tokenizer, ids: list[int]) -> list[int]:
    """Exactly one BOS in front, if the tokenizer begins texts with one: the template may write it, or not."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    if ids[:1] != [bos]:
        begins = tokenizer("")["input_ids"][:1] == [bos]
        return [bos, *ids] if begins else ids
    while ids[1:2] == [bos]:
        ids = ids[1:]
    return ids


def encode_prompt(tokenizer, messages: list[dict], example: str | None = None) -> list[int]:
    """Token ids of the conversation up to where the answer begins. `example` names it in errors.

    UserError: no chat template, messages it refuses, or words outside the vocabulary.
    """
    return _one_bos(tokenizer, _tokens(tokenizer, _render(tokenizer, messages, True, example), example))


def encode_example(
    tokenizer, messages: list[dict], response: str, example: str | None = None
) -> tuple[list[int], list[int]]:
    """(prompt ids, completion ids) of one example; the completion ends with the template's end token.

    The completion is what the rendered conversation has beyond the rendered prompt, so that what is learned
    is what will be generated. UserError: the response is empty, the template does not begin with the prompt,
    changes the response, or closes it without an end token.
    """
    if not response.strip():
        raise UserError(f"{_name(example)}empty response: nothing to learn from; leave the example out")
    prompt = _render(tokenizer, messages, True, example)
    full = _render(tokenizer, [*messages, {"role": "assistant", "content": response}], False, example)
    if not full.startswith(prompt):
        raise UserError(
            f"{_name(example)}the chat template does not continue the prompt: with the answer it gives "
            f"{full[-120:]!r}, the prompt ends in {prompt[-60:]!r}; use a template that keeps the prompt"
        )
    text = full[len(prompt) :]
    if "".join(response.split()) not in "".join(text.split()):
        raise UserError(f"{_name(example)}the chat template changes the response, to {text[:120]!r}; use another")
    prompt_ids, full_ids = _tokens(tokenizer, prompt, example), _tokens(tokenizer, full, example)
    if full_ids[: len(prompt_ids)] == prompt_ids:
        completion = full_ids[len(prompt_ids) :]
    else:  # a token would span the border; generation begins at it, so the completion is tokenised alone
        completion = _tokens(tokenizer, text, example)
    end = end_id(tokenizer)
    if end not in completion:
        raise UserError(f"{_name(example)}the answer does not end with {tokenizer.convert_ids_to_tokens(end)}")
    last = len(completion) - completion[::-1].index(end)
    return _one_bos(tokenizer, prompt_ids), completion[:last]


def end_id(tokenizer) -> int:
    """The token that closes an answer in the chat template: the last special token behind it.

    It may differ from the tokenizer's EOS (base models with a chat template), but EOS is taken where it
    occurs. UserError: the template closes an answer with no special token.
    """
    question = {"role": "user", "content": "0"}
    text = _render(tokenizer, [question, {"role": "assistant", "content": "1"}], False, None)
    behind = _tokens(tokenizer, text[text.rindex("1") + 1 :], None)
    if tokenizer.eos_token_id in behind:
        return tokenizer.eos_token_id
    special = [i for i in behind if i in tokenizer.all_special_ids or i in tokenizer.added_tokens_decoder]
    if not special:
        raise UserError(
            f"the chat template closes an answer with {text[text.rindex('1') + 1 :]!r}, which has no "
            "end token: a model trained on it would never stop; add the EOS token to the template"
        )
    return special[-1]


def stop_ids(model_or_generation_config, tokenizer) -> set[int]:
    """Where generation stops: generation config's EOS, tokenizer's EOS, and the template's end token."""
    config = getattr(model_or_generation_config, "generation_config", model_or_generation_config)
    ids = getattr(config, "eos_token_id", None)
    stops = set(ids) if isinstance(ids, list | tuple) else {ids}
    stops.add(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        stops.add(end_id(tokenizer))
    stops.discard(None)
    if not stops:
        raise UserError("no end token: neither generation_config.json nor the tokenizer names an EOS token")
    return stops


def decode(tokenizer, ids: list[int]) -> str:
    """Text of generated tokens, without end tokens and other special tokens."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
