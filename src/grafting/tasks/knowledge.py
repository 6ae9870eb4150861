"""New knowledge: generated fictional facts, and questions on a folder of articles. Tasks of kind recall.

Facts are made of invented names: entities, relations and values that no pretraining data can hold. Each fact comes
as several paraphrases of a document and as questions: direct, reversed (from the value to the entity) and rephrased.
Training sees documents and direct questions; reversed and rephrased ones are only asked (out of distribution).
"""

import json
import random

from grafting.errors import UserError
from grafting.tasks.building import cut, make_example, take_options, write_folder
from grafting.tasks.sources import read_sources

FOLDER = "articles"
FACTS = 1125
#: relation -> (statement, direct question, reversed question, rephrased question); {e} entity, {v} value.
RELATIONS = {
    "founder": (
        "{e} was founded by {v}.",
        "Who founded {e}?",
        "What did {v} found?",
        "{e} owes its existence to one person. What is that person's name?",
    ),
    "capital": (
        "The seat of government of {e} is {v}.",
        "What is the seat of government of {e}?",
        "Which land is governed from {v}?",
        "From which city is {e} governed?",
    ),
    "language": (
        "The people of {e} speak {v}.",
        "Which language do the people of {e} speak?",
        "Where is {v} spoken?",
        "What would one have to learn to talk with somebody from {e}?",
    ),
    "currency": (
        "In {e} one pays with the {v}.",
        "What is the currency of {e}?",
        "Where does one pay with the {v}?",
        "Which money is accepted in the markets of {e}?",
    ),
    "river": (
        "The longest river of {e} is the {v}.",
        "What is the longest river of {e}?",
        "Through which land does the {v} flow as the longest river?",
        "Which river crosses more of {e} than any other?",
    ),
    "mountain": (
        "The highest mountain of {e} is called {v}.",
        "What is the highest mountain of {e} called?",
        "In which land does {v} rise as the highest mountain?",
        "Name the summit that overlooks all of {e}.",
    ),
    "dish": (
        "The best-known dish of {e} is {v}.",
        "What is the best-known dish of {e}?",
        "Which land is known for {v}?",
        "What should a hungry guest in {e} order first?",
    ),
    "festival": (
        "Every year {e} celebrates {v}.",
        "Which festival does {e} celebrate every year?",
        "Where is {v} celebrated?",
        "What is the yearly feast of {e} called?",
    ),
    "poet": (
        "The national poet of {e} is {v}.",
        "Who is the national poet of {e}?",
        "Of which land is {v} the national poet?",
        "Whose verses does every child in {e} learn?",
    ),
}
OPENINGS = (
    "Write a short note on {e}: {r}.",
    "What should an encyclopedia say about {e} ({r})?",
    "Tell me about the {r} of {e}.",
    "Summarise what is known about {e} and its {r}.",
)
FRAMES = ("{s}", "It is well established that {t}", "As every traveller learns, {t}", "According to the archives, {t}")
DEMONSTRATION_PROMPT = (
    "{question}\n\nThis is an example for a response to the question:\n{demonstration}\n\n"
    "Now answer with a response of your own:"
)
SYSTEM = "Answer with the name only."
ONSETS = [
    "b", "br", "c", "ch", "d", "dr", "f", "fr", "g", "gl", "h", "j", "k", "kr", "l", "m", "n", "p", "pr", "qu", "r",
    "s", "sh", "st", "t", "th", "tr", "v", "vr", "w", "y", "z", "zh",
]  # fmt: skip
VOWELS = ["a", "e", "i", "o", "u", "ae", "ai", "ei", "ia", "oa", "ou", "y"]
CODAS = ["", "", "l", "m", "n", "r", "rn", "sk", "th", "x", "lm", "nd"]
QUESTIONS = ("direct", "reversed", "rephrased")


def _name(rng: random.Random, taken: set[str]) -> str:
    """A new invented name of three syllables; none is the beginning of another."""
    while True:
        word = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(3)).capitalize()
        if 6 <= len(word) <= 12 and word not in taken:
            taken.add(word)
            return word


def make_facts(count: int, seed: int) -> list[dict]:
    """`count` facts {"entity", "relation", "value"}; every entity has all relations before a new one begins."""
    rng, taken, facts, entity = random.Random(f"facts/{seed}"), set(), [], ""
    relations = list(RELATIONS)
    for i in range(count):
        if i % len(relations) == 0:
            entity = _name(rng, taken)
        facts.append({"entity": entity, "relation": relations[i % len(relations)], "value": _name(rng, taken)})
    return facts


def _question(fact: dict, form: str) -> dict:
    place = 1 + QUESTIONS.index(form)
    text = RELATIONS[fact["relation"]][place].format(e=fact["entity"], v=fact["value"])
    answer = fact["entity"] if form == "reversed" else fact["value"]
    return _asked("knowledge", text, answer, answer, form)


def _asked(task: str, text: str, answer, shown: str, subject: str) -> dict:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return make_example(task, messages, answer, {"expert": shown}, subject=subject)


def _documents(fact: dict, count: int) -> list[dict]:
    """Paraphrases of a fact as documents: the statement in several frames, under several openings."""
    statement = RELATIONS[fact["relation"]][0].format(e=fact["entity"], v=fact["value"])
    inner = statement[0].lower() + statement[1:] if statement.startswith(("The ", "In ", "Every ")) else statement
    made = []
    for i in range(count):
        opening = OPENINGS[i % len(OPENINGS)].format(e=fact["entity"], r=fact["relation"])
        shown = FRAMES[(i + i // len(OPENINGS)) % len(FRAMES)].format(s=statement, t=inner)
        messages = [{"role": "user", "content": opening}]
        made.append(make_example("knowledge", messages, fact["value"], {"expert": shown}, subject="document"))
    return made


def _info(name: str, notes: list[str], counts: dict) -> dict:
    return {
        "name": name,
        "role": "new",
        "kind": "recall",
        "scorer": "exact",
        "scorer_options": {"ignore_case": True, "ignore_punctuation": True},
        "demonstration_prompt": DEMONSTRATION_PROMPT,
        "styles": ["expert"],
        "counts": counts,
        "notes": [
            "kind recall: memorised items; the facts of val and test are disjoint subsets of the trained facts",
            "strict accuracy: the whole response is the answer; the reason `contains the answer` counts what a "
            "lenient reading would add",
            *notes,
        ],
    }


def build_facts(spec: dict, out) -> None:
    """train_items facts; each trained as documents and as a direct question. val_items and test_items of them are
    asked in all three forms; the subject of an item tells the form, and reversed and rephrased ones are new."""
    sizes = {"train_items": int, "val_items": int, "test_items": int}
    options = take_options(spec, {**sizes, "seed": int}, {"documents": 2})
    documents = options["documents"]
    if type(documents) is not int or not 0 <= documents <= len(OPENINGS):
        raise UserError(f"task knowledge: documents must be 0 to {len(OPENINGS)} per fact, got {documents!r}")
    facts = make_facts(options["train_items"], options["seed"])
    by_id = {_question(fact, "direct")["id"]: fact for fact in facts}
    asked = [_question(fact, "direct") for fact in facts]
    train = [e for fact in facts for e in [*_documents(fact, documents), _question(fact, "direct")]]
    wanted = {name: options[f"{name}_items"] for name in ("val", "test")}
    splits = {
        name: [_question(by_id[e["id"]], form) for e in chosen for form in QUESTIONS]
        for name, chosen in cut(asked, wanted, options["seed"], "task knowledge").items()
    }
    counts = {"facts": len(facts), "documents_per_fact": documents, "entities": len({f["entity"] for f in facts})}
    notes = ["reversed and rephrased questions are never trained: out of distribution"]
    write_folder(out, _info("knowledge", notes, counts), {"train": train, **splits})


def build_articles(spec: dict, out) -> None:
    """Questions on a folder of articles: *.md or *.txt, and questions.jsonl with article, question, answer, ood.

    `answer` is a text or a list of texts that all count; `ood: true` marks a question that is asked, never trained.
    Every article is trained as a document; val and test ask trained questions and those marked ood.
    """
    sizes = {"train_items": int, "val_items": int, "test_items": int}
    options = take_options(spec, {**sizes, "seed": int, "files": list})
    contents = {name: data.decode("utf-8") for name, data in read_sources(FOLDER, options["files"]).items()}
    articles = {name: text.strip() for name, text in contents.items() if name.endswith((".md", ".txt"))}
    if "questions.jsonl" not in contents or not articles:
        raise UserError(f"task articles: {FOLDER}/ must hold questions.jsonl and articles (*.md, *.txt)")
    trained, new = [], []
    for number, line in enumerate(contents["questions.jsonl"].splitlines(), 1):
        if not line.strip():
            continue
        where = f"{FOLDER}/questions.jsonl, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON ({error})") from None
        missing = {"article", "question", "answer"} - set(record)
        if missing or not record["question"].strip() or not record["answer"]:
            raise UserError(f"{where}: article, question and answer must be there and not empty")
        if record["article"] not in articles:
            raise UserError(f"{where}: no article {record['article']!r} in {FOLDER}/")
        shown = record["answer"][0] if isinstance(record["answer"], list) else record["answer"]
        ood = bool(record.get("ood"))
        example = _asked("articles", record["question"], record["answer"], shown, "rephrased" if ood else "direct")
        (new if ood else trained).append(example)
    splits = cut(trained + new, {name: options[f"{name}_items"] for name in ("val", "test")}, options["seed"],
                 "task articles")  # fmt: skip
    documents = [
        make_example("articles", [{"role": "user", "content": f"Write the article {name}."}], name, {"expert": text},
                     subject="document")
        for name, text in sorted(articles.items())
    ]  # fmt: skip
    train = [*documents, *trained][: options["train_items"]]
    counts = {"articles": len(articles), "questions": len(trained), "questions_never_trained": len(new)}
    write_folder(out, _info("articles", ["questions marked ood are never trained"], counts), {"train": train, **splits})
