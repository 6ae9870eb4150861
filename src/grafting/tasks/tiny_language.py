"""The tiny language: word-like tokens, 19 prior skills, new tasks, and the streams a model learns it from.

A model that knows it was pretrained in the base format, post-trained in the deployed format, and copies
answers from demonstrations, for keywords without meaning too. The shares and sizes below were found by trial.
"""

import itertools
import random
from collections.abc import Iterator

from grafting.errors import UserError

# ---- vocabulary (160 words) -------------------------------------------------------------------------
PAD, EOS = "<pad>", "<eos>"
MARKERS = [PAD, EOS, "Q:", "A:", "<user>", "<bot>", "<ans>", "</ans>", "<ex>", "</ex>", "+", "so", "."]
LETTERS = list("abcdefghijkl")
CAPITALS = [c.upper() for c in LETTERS]
DIGITS = list("0123456789")
GREEK = [f"g{i}" for i in range(12)]
ATTRIBUTES = [f"attr{i}" for i in range(16)]
PRETRAINED_SKILLS = [
    "copy", "rev", "sort", "up", "low", "next", "first", "last", "swap",
    "dbl", "max", "add", "fact", "firstup", "lastup", "dblup", "nextswap",
]  # fmt: skip
POSTTRAINED_SKILLS = ["second", "min"]  # come only with post-training
SKILLS = PRETRAINED_SKILLS + POSTTRAINED_SKILLS
NEW_TASKS = ["wug", "zup", "dax", "pim"]
NONSENSE = [f"n{i}" for i in range(24)]  # keywords that mean nothing: their demonstrations are random
SYNONYMS = 3  # keywords per skill, drawn uniformly in training: copy, copy1, copy2
KEYWORDS = [skill + (str(i) if i else "") for skill in SKILLS for i in range(SYNONYMS)]
VOCABULARY = MARKERS + LETTERS + CAPITALS + DIGITS + GREEK + ATTRIBUTES + KEYWORDS + NEW_TASKS + NONSENSE
ID = {word: i for i, word in enumerate(VOCABULARY)}

RECALL = {"fact", "wug", "add"}  # memorised, so tested on trained items
STYLE_WORDS = ["<ans>", "</ans>", "so", "."]  # markers of a response's style, no part of the answer

# ---- shares of the training streams -----------------------------------------------------------------
INPUT_SHARES = (
    0.80,
    0.06,
    0.07,
)  # letters, digits, Greek; the rest are keywords, to keep their embeddings apart
UNTAGGED_CHAT_SHARE = 0.15  # of pretraining: the chat template without the closing tag
KNOWN_SKILL_SHARE = 0.35  # of the demonstrated examples: a known skill with its right answer
EXPERT_SHARE = 0.5  # of the demonstrations: in the expert's style
NOISE_SHARE = 0.3  # of the demonstrated examples: response inputs corrupted, labels kept ...
NOISE_RATE = 0.3  # ... each with this probability: the teacher stays in place after a wrong prefix
POOL = 40  # batches sorted by length together, so that little is padded
HELD_OUT = 10  # one input in ten is kept for validation and test


def _facts() -> tuple[dict, dict]:
    """100 three-letter names and 60 names of two Greek tokens (wug), each with one attribute."""
    rng = random.Random(7)

    def names(count: int, alphabet: list[str], length: int) -> list[tuple]:
        every = list(itertools.product(alphabet, repeat=length))
        rng.shuffle(every)
        return every[:count]

    old = {name: rng.choice(ATTRIBUTES) for name in names(100, LETTERS, 3)}
    new = {name: rng.choice(ATTRIBUTES) for name in names(60, GREEK, 2)}
    return old, new


FACTS, NEW_FACTS = _facts()


# ---- skills -----------------------------------------------------------------------------------------
def _following(x: list[str]) -> list[str]:
    return [LETTERS[(LETTERS.index(c) + 1) % len(LETTERS)] for c in x]


def _swapped(x: list[str]) -> list[str]:
    return [x[1], x[0], *x[2:]]


def _doubled(x: list[str]) -> list[str]:
    return [c for c in x for _ in (0, 1)]


def _upper(x: list[str]) -> list[str]:
    return [c.upper() for c in x]


ANSWERS = {
    "copy": lambda x: x,
    "rev": lambda x: x[::-1],
    "sort": sorted,
    "up": _upper,
    "low": lambda x: [c.lower() for c in x],
    "next": _following,
    "first": lambda x: x[:1],
    "last": lambda x: x[-1:],
    "swap": _swapped,
    "dbl": _doubled,
    "max": lambda x: [max(x)],
    "min": lambda x: [min(x)],
    "second": lambda x: x[1:2],
    "firstup": lambda x: _upper(x[:1]),
    "lastup": lambda x: _upper(x[-1:]),
    "dblup": lambda x: _upper(_doubled(x)),
    "nextswap": lambda x: _following(_swapped(x)),
    "add": lambda x: list(f"{int(x[0]) + int(x[2]):02d}"),
    "fact": lambda x: [FACTS[tuple(x)]],
    "wug": lambda x: [NEW_FACTS[tuple(x)]],  # new: facts about Greek names
    "zup": lambda x: _upper(x[::-1]),  # new: reverse, then upper case
    "dax": lambda x: [max(x), min(x)],  # new: two known skills in a row, on digits
    "pim": lambda x: _upper(_swapped(x)),  # new: swap, then upper case; related to zup
}


def _string(rng: random.Random, alphabet: list[str], length: int | None = None) -> list[str]:
    return [rng.choice(alphabet) for _ in range(length or rng.choice([3, 4]))]


def _mixed_input(rng: random.Random) -> list[str]:
    draw, edge = rng.random(), 0.0
    for share, alphabet in zip(INPUT_SHARES, (LETTERS, DIGITS, GREEK), strict=True):
        edge += share
        if draw < edge:
            return _string(rng, alphabet)
    return _string(rng, NONSENSE + NEW_TASKS)


def _input(task: str, rng: random.Random) -> list[str]:
    if task == "fact":
        return list(rng.choice(list(FACTS)))
    if task == "wug":
        return list(rng.choice(list(NEW_FACTS)))
    if task == "add":
        return [str(rng.randrange(10)), "+", str(rng.randrange(10))]
    if task == "low":
        return _string(rng, CAPITALS)
    if task in ("max", "min", "dax"):
        return _string(rng, DIGITS)
    if task in ("copy", "rev", "first", "last", "swap", "second"):
        return _mixed_input(rng)
    if task in ("dbl", "dblup"):
        return _string(rng, LETTERS, 3)  # the answer is twice as long
    return _string(rng, LETTERS)


def is_held_out(x: list[str]) -> bool:
    """Whether an input belongs to the tenth kept for validation and test: a hash of its tokens decides."""
    value = 0
    for word in x:
        value = (value * 31 + ID[word] * 7 + 3) % 1000003
    return value % HELD_OUT == 0


def sample(task: str, rng: random.Random, held_out: bool = False) -> tuple[list[str], list[str]]:
    """Input and answer tokens of one item; trained or held-out inputs, except for the memorised tasks."""
    while True:
        x = _input(task, rng)
        if task in RECALL or is_held_out(x) == held_out:
            return x, ANSWERS[task](x)


def recall_items(task: str) -> list[tuple[list[str], list[str]]]:
    """Every item of a memorised task."""
    if task == "add":
        inputs = [[str(a), "+", str(b)] for a in range(10) for b in range(10)]
    else:
        inputs = [list(name) for name in (FACTS if task == "fact" else NEW_FACTS)]
    return [(x, ANSWERS[task](x)) for x in inputs]


def expert_style(answer: list[str]) -> list[str]:
    """The expert's way of answering, which the deployed model would not choose: `so y .`"""
    return ["so", *answer, "."]


# ---- training streams -------------------------------------------------------------------------------
def _random_answer(rng: random.Random) -> list[str]:
    draw, length = rng.random(), rng.choice([1, 2, 3, 3, 4, 4, 5, 5, 6])
    # small sub-alphabets repeat letters, so that copying must go by position
    size = rng.choice([2, 4, len(LETTERS)])
    if draw < 0.45:
        return _string(rng, rng.sample(LETTERS, size), length)
    if draw < 0.70:
        return _string(rng, rng.sample(CAPITALS, size), length)
    if draw < 0.80:
        return _string(rng, DIGITS, 2)
    if draw < 0.90:
        return _string(rng, rng.sample(GREEK, size), length)
    return [rng.choice(ATTRIBUTES)]


def _synonym(keyword: str, rng: random.Random) -> str:
    if keyword not in SKILLS:
        return keyword
    return keyword + rng.choice(["", *(str(i) for i in range(1, SYNONYMS))])


def _corrupt(ids: list[int], rng: random.Random) -> list[int]:
    low, high = ID[LETTERS[0]], ID[ATTRIBUTES[-1]]  # content tokens stand side by side in the vocabulary
    return [rng.randint(low, high) if low <= i <= high and rng.random() < NOISE_RATE else i for i in ids]


def _training_example(rng, phase, skills, weights, demonstration_share) -> tuple[list[int], list[int], list[int]]:
    chat = phase == "posttrain" or rng.random() < UNTAGGED_CHAT_SHARE
    noise, shown = False, []
    if rng.random() < demonstration_share:
        noise = rng.random() < NOISE_SHARE
        if rng.random() < KNOWN_SKILL_SHARE:
            keyword = rng.choice(skills)
            x, y = sample(keyword, rng)
        else:
            keyword = rng.choice(NONSENSE + NEW_TASKS)
            length = rng.choice([2, 3, 4])
            x = _string(rng, rng.choice([LETTERS, LETTERS, LETTERS, DIGITS, CAPITALS, GREEK]), length)
            y = _random_answer(rng)
        shown = ["<ex>", *(expert_style(y) if rng.random() < EXPERT_SHARE else y), "</ex>"]
    else:
        keyword = rng.choices(skills, weights)[0]
        x, y = sample(keyword, rng)
    start, turn = ("<user>", "<bot>") if chat else ("Q:", "A:")
    end = ["</ans>", EOS] if phase == "posttrain" else [EOS]
    prompt = [ID[w] for w in [start, _synonym(keyword, rng), *x, *shown, turn]]
    labels = [ID[w] for w in [*y, *end]]
    return prompt, _corrupt(labels, rng) if noise else list(labels), labels


def training_stream(
    rng: random.Random,
    phase: str,
    batch_size: int,
    demonstration_share: float,
    skill_weights: dict[str, float],
) -> Iterator[list[tuple[list[int], list[int], list[int]]]]:
    """Endless batches of (prompt ids, completion ids as input, completion ids as labels).

    phase "pretrain" (base format `Q: kw x A: y <eos>`, partly chat without the closing tag) or "posttrain"
    (deployed format `<user> kw x <bot> y </ans> <eos>`, all 19 skills). Input and label completions have
    equal length and differ only in the corrupted examples. `skill_weights` are relative to 1.
    UserError for the weight of a skill that the phase does not teach.
    """
    if phase not in ("pretrain", "posttrain"):
        raise ValueError(f"phase must be pretrain or posttrain, not {phase!r}")
    skills = PRETRAINED_SKILLS if phase == "pretrain" else SKILLS
    unknown = sorted(set(skill_weights) - set(skills))
    if unknown:
        raise UserError(f"{phase}.skill_weights: unknown skill {unknown[0]!r}; known are {', '.join(skills)}")
    weights = [skill_weights.get(skill, 1.0) for skill in skills]
    while True:
        pool = [_training_example(rng, phase, skills, weights, demonstration_share) for _ in range(batch_size * POOL)]
        pool.sort(key=lambda example: len(example[0]) + len(example[1]))
        batches = [pool[i * batch_size : (i + 1) * batch_size] for i in range(POOL)]
        rng.shuffle(batches)
        yield from batches
