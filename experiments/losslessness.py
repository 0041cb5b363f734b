"""The table of losslessness: every practice of the catalogue under three rules, enumerated, searched and proved.

    python -m experiments.losslessness --out build/losslessness

For each practice and rule it prints the largest total variation to the target's law over random tabular models, of one
request and of two requests jointly (`exact_output_law`), and the verdicts of `certify` and `check_non_anticipating` at
64 requests and 8 drafts. Writes losslessness.md, losslessness.json and losslessness.png. Seeded.
"""

import argparse
import functools
import json
import pathlib
import sys
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy import stats
from tqdm import tqdm

from specav import estimators
from specav.labels import RULES
from specav.lossless.anticipation import check_non_anticipating
from specav.lossless.catalogue import CATALOGUE, Practice
from specav.lossless.certify import certify
from specav.lossless.exact import exact_output_law, table_family, total_variation
from specav.lossless.scheme import one_token_law

EXACT = 1e-12  # total variation below which two float64 laws count as equal
LARGE_VOCABULARY, LONG = 150_000, 16  # of the practices whose fault grows with the vocabulary, in tokens


class Shape(NamedTuple):
    """Models of one search: V, K, requests, tokens, and how many."""

    vocabulary: int
    num_draft_tokens: int
    num_requests: int
    num_tokens: int
    num_models: int


ALONE = (Shape(2, 2, 1, 3, 200), Shape(3, 2, 1, 3, 200))
LOOK_AHEAD = (Shape(2, 3, 1, 3, 100),)  # K = 3 shows what K = 2 is too short for
TOGETHER = (Shape(2, 2, 2, 2, 30), Shape(2, 3, 2, 2, 20))
SHAPES = (*ALONE, *LOOK_AHEAD, *TOGETHER)


class Measured(NamedTuple):
    """Largest total variation over models: of one request, and of two requests jointly."""

    own: float
    joint: float


class Judged(NamedTuple):
    """A practice under a rule: measured, and the words of the two checks."""

    practice: str
    rule: str
    measured: Measured
    certified: tuple[str, str]
    witness: str | None


def random_models(seed: int, shape: Shape, kind: str = "autoregressive"):
    """(draft, target, prompts): M pairs of random tables over the last token, of all scales, half of them similar.

    Args:
      seed: of the tables.
      shape: how many, and over what vocabulary.
      kind: of the drafter; parallel drafters get a table for each of their K positions.
    """
    rng = np.random.default_rng(seed)
    size = (shape.num_models, 1 + shape.vocabulary, shape.vocabulary)
    scale = rng.choice([0.5, 1.0, 2.0, 4.0], (shape.num_models, 1, 1))
    target = rng.normal(size=size) * scale
    draft = rng.normal(size=size) * scale
    draft[::2] = target[::2] + 0.4 * draft[::2]
    if kind == "parallel":
        noise = rng.normal(size=(*size[:2], shape.num_draft_tokens, size[2]))
        draft = draft[:, :, None] + 0.5 * noise
    prompts = np.arange(shape.num_models)[:, None]
    return table_family(draft), table_family(target), prompts


def measure(practice: Practice, rule: str, shapes: tuple[Shape, ...], seed: int = 0) -> Measured:
    """The largest total variations of a practice under a rule over random models of some shapes.

    A fault of the residual that no small vocabulary shows is judged by `repeated_total_variation` instead.
    """
    if practice.scheme.residual is not None:
        return Measured(*[repeated_total_variation(practice)] * 2)
    own, joint = 0.0, 0.0
    for shape in shapes:
        draft, target, prompts = random_models(seed, shape, practice.scheme.drafter)
        output = exact_output_law(
            _policy(practice, shape.num_requests, shape.num_draft_tokens),
            draft,
            target,
            rule=rule,
            num_draft_tokens=shape.num_draft_tokens,
            num_tokens=shape.num_tokens,
            prompts=prompts,
            num_requests=shape.num_requests,
            drafter=practice.scheme,
            estimator=_estimator(practice.features, shape.num_draft_tokens),
        )
        joint = max(joint, float(np.max(total_variation(output))))
        for request in range(shape.num_requests):
            others = tuple(1 + other for other in range(shape.num_requests) if other != request)
            law, target = output.law.sum(axis=others), output.target.sum(axis=others)
            own = max(own, float(np.max(0.5 * np.abs(law - target).sum(axis=1))))
    return Measured(own, joint)


def repeated_total_variation(practice: Practice, seed: int = 0, trials: int = 24) -> float:
    """A lower bound on the total variation of 16 tokens at a vocabulary of 150,000, the best over random laws.

    Tokens are independent and all drafts verified, one at a time. The law is compared on one event, how many tokens
    come from the set that the practice favours: two binomial laws.
    """
    rng = np.random.default_rng(seed)
    found = [0.0]
    for _ in range(trials):
        scale = rng.uniform(0.5, 6)
        draft, target = rng.normal(size=(2, LARGE_VOCABULARY)) * scale
        target[0] = draft.max() + rng.uniform(5, 30)  # a target that is sure, and a draft that is not quite
        draft[0] = draft.max() + rng.uniform(0, 20)
        emitted = one_token_law(practice.scheme, draft, target)
        promised = practice.scheme.target(target)
        favoured = emitted > promised
        number = np.arange(LONG + 1)
        laws = [stats.binom.pmf(number, LONG, law[favoured].sum()) for law in (emitted, promised)]
        found.append(float(total_variation(*laws)))
    return max(found)


def judge(practice: Practice, rule: str, *, num_requests: int = 64, num_draft_tokens: int = 8) -> Judged:
    """Everything the laboratory says about a practice under a rule."""
    policy = _policy(practice, num_requests, num_draft_tokens)
    given = {
        "rule": rule,
        "drafter": practice.scheme,
        "num_requests": num_requests,
        "num_draft_tokens": num_draft_tokens,
        "acceptance_depends_on": practice.acceptance_depends_on,
    }
    certificate = certify(policy, **given)
    finding = check_non_anticipating(policy, **given)
    witness = finding.marginal or finding.joint
    return Judged(
        practice.name,
        rule,
        measure(practice, rule, SHAPES),
        (certificate.marginal, certificate.joint),
        finding.scheme or (None if witness is None else witness.explanation),
    )


def table(rows: list[Judged]) -> str:
    """Markdown: a line per practice, and for each rule the two total variations and the verdict."""
    by_practice = {(row.practice, row.rule): row for row in rows}
    lines = [
        "| practice | verifies | source | " + " | ".join(RULES) + " |",
        "|---|---|---|" + "---|" * len(RULES),
    ]
    for practice in CATALOGUE:
        cells = [_cell(by_practice[practice.name, rule]) for rule in RULES if (practice.name, rule) in by_practice]
        lines.append(f"| {practice.name} | {practice.formula} | {practice.source} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[Judged], path: pathlib.Path) -> None:
    """A heat map of the joint total variation, practices by rules, on a logarithmic scale."""
    names = [practice.name for practice in CATALOGUE]
    values = np.full((len(names), len(RULES)), np.nan)
    for row in rows:
        values[names.index(row.practice), RULES.index(row.rule)] = max(row.measured)
    figure = Figure(figsize=(6.4, 0.3 * len(names) + 1.2), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(np.log10(np.maximum(values, 1e-5)), aspect="auto", cmap="Reds", vmin=-4, vmax=0)
    axes.set_xticks(range(len(RULES)), RULES)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    for (i, j), value in np.ndenumerate(values):
        colour = "white" if value > 0.1 else "black"
        axes.text(j, i, _number(value), ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(shown, label="log10 of the largest total variation found")
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Judges every practice of the catalogue under every rule.")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/losslessness"))
    parser.add_argument("--only", default="", help="practices whose name contains this")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=8)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [(p, rule) for p in CATALOGUE for rule in RULES if options.only in p.name]
    rows = [
        judge(practice, rule, num_requests=options.requests, num_draft_tokens=options.drafts)
        for practice, rule in tqdm(wanted, desc="practices", file=sys.stderr)
    ]
    command = "python -m experiments.losslessness " + " ".join(sys.argv[1:] if arguments is None else arguments)
    (options.out / "losslessness.md").write_text(table(rows) + f"\n\nMade by `{command.strip()}`.\n")
    record = {
        "command": command.strip(),
        "rows": [row._replace(measured=row.measured._asdict())._asdict() for row in rows],
    }
    (options.out / "losslessness.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(rows, options.out / "losslessness.png")
    print(table(rows))


@functools.cache
def _policy(practice, num_requests, num_draft_tokens):
    """One object per shape, so that it is compiled once."""
    return practice.policy(num_requests, num_draft_tokens)


@functools.cache
def _estimator(features, num_draft_tokens):
    """An estimator that learns after every round, so that its state matters; None if nothing reads it."""
    return estimators.online_logistic(num_draft_tokens, features, refit_interval=1) if features else None


def _cell(row):
    own, joint = row.measured
    marginal, both = row.certified
    words = both if both == marginal else f"{marginal}; joint {both}"
    if row.witness is not None and "leak" not in words:
        words += ", counterexample found"
    numbers = _number(own) if _number(own) == _number(joint) else f"{_number(own)}, joint {_number(joint)}"
    return f"{numbers} ({words})"


def _number(value):
    return "0" if value < EXACT else f"{value:.1g}" if value < 0.01 else f"{value:.2f}"[1:]


if __name__ == "__main__":
    main()
