"""The exact law of what speculative decoding emits, by enumeration: the proof, or the counterexample, for small models.

Every draft, verdict and added token of several consecutive rounds is followed with its probability in float64; nothing
is sampled. Policies and estimators are the real JAX functions with their states. A policy is lossless under a rule
exactly if the law of the emitted tokens is the target's, whatever the models: `total_variation` 0, up to rounding.

Many models are judged in one call: a batch of models is one model whose first prompt token says which
(`table_family`).

References:
  Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023, theorem 1: the identity that
  is enumerated here together with what decides how many drafts are verified.
"""

import itertools
from typing import NamedTuple

import numpy as np

from specav._checks import one_of, static_int
from specav.estimators.base import AcceptanceEstimator
from specav.features import FEATURES
from specav.labels import RULES
from specav.lossless.decisions import inputs_read, state_codec
from specav.lossless.paths import bound_on_paths
from specav.lossless.rounds import Setting, last_round, play_round
from specav.lossless.scheme import Scheme, as_scheme
from specav.lossless.tabular import Model, markov_model, table_family
from specav.lossless.worlds import Tables, Worlds, first_worlds, join, merge, take
from specav.policies import Policy

__all__ = [
    "Bias",
    "Model",
    "OutputLaw",
    "estimated_paths",
    "exact_output_law",
    "largest_bias",
    "markov_model",
    "table_family",
    "total_variation",
]

_ROWS_AT_ONCE = 200_000  # drafted blocks per pass: bounds the memory


class OutputLaw(NamedTuple):
    """Laws of the first n emitted tokens of M batches of R requests.

    Attributes:
      law: float64 [M, V^n, ..., V^n], one axis per request: the joint law; sequences in lexicographic order.
      target: float64, same shape: the law it must be equal to.
      num_tokens: n.
      vocabulary: V.
      num_paths: histories that were enumerated.
    """

    law: np.ndarray
    target: np.ndarray
    num_tokens: int
    vocabulary: int
    num_paths: int


class Bias(NamedTuple):
    """Where a law is most wrong.

    Attributes:
      batch: index of the batch.
      request: index of the request; None if every request's own law is exact and the joint one is not.
      tokens: the prefix, of 1 to n tokens; of all requests, a tuple of n tokens for each, where `request` is None.
      probability: what is emitted.
      target_probability: what should be.
    """

    batch: int
    request: int | None
    tokens: tuple
    probability: float
    target_probability: float


def exact_output_law(
    policy: Policy,
    draft: Model,
    target: Model,
    *,
    rule: str,
    num_draft_tokens: int,
    num_tokens: int,
    prompts=((0,),),
    num_requests: int = 1,
    num_rounds: int | None = None,
    drafter: str | Scheme = "autoregressive",
    estimator: AcceptanceEstimator | None = None,
    refill: str = "block",
    num_drafts=None,
    feature_names: tuple[str, ...] = (),
    max_paths: int = 10**8,
) -> OutputLaw:
    """The joint law of the first n emitted tokens of every request, over as many rounds as that takes.

    Args:
      policy: what decides; it need not be lossless, and its declaration is not believed.
      draft: (tokens int32 [N, L], lengths int [N]) -> raw logits float64 [N, V] of the token after the first
        `lengths` ones (prompt, emitted tokens, drafts; -1 beyond). Parallel drafters: [N, K, V], the laws of the next
        K drafts, whatever is drawn. Must be a function of its arguments.
      target: the same, [N, V].
      rule: "standard", "coupled" or "deferred".
      num_draft_tokens: K.
      num_tokens: n, per request. A request with n tokens takes no further part; until then it gets all its drafts.
      prompts: int [M, P] (the same for all requests of a batch) or [M, R, P]: M independent batches.
      num_requests: R, requests that are decoded together.
      num_rounds: after so many rounds kept drafts are all tested and missing tokens drawn from the target. None: as
        many as it takes.
      drafter: "autoregressive", "parallel", "point_mass", or a `Scheme`: laws of both sides.
      estimator: predicts acceptance and learns from every round. None: sigmoid(logit_q_max).
      refill: deferred rule only, as in `specav.decode`.
      num_drafts: int [R], drafts per block of each request. Default K.
      feature_names: features that the policy is given beside those that its trace reads.
      max_paths: largest number of histories.

    Returns:
      An `OutputLaw`.

    Raises:
      TypeError, ValueError: bad arguments, or an estimate of more than `max_paths` histories (with the number).
    """
    scheme = as_scheme(drafter)
    width, length = static_int("num_draft_tokens", num_draft_tokens, 1), static_int("num_tokens", num_tokens, 1)
    prompts = _prompts(prompts, static_int("num_requests", num_requests, 1))
    drafts = _num_drafts(num_drafts, num_requests, width)
    first = np.full((len(prompts), prompts.shape[2] + length + width), -1, np.int32)
    first[:, : prompts.shape[2]] = prompts[:, 0]
    vocabulary = np.asarray(target(first, np.full(len(first), prompts.shape[2]))).shape[-1]
    paths = estimated_paths(
        policy,
        rule=rule,
        num_draft_tokens=width,
        num_tokens=length,
        vocabulary=vocabulary,
        num_batches=len(prompts),
        num_requests=num_requests,
        num_rounds=num_rounds,
        drafter=scheme,
        estimator=estimator,
        refill=refill,
        num_drafts=num_drafts,
    )
    if paths > max_paths:
        raise ValueError(
            f"max_paths: expected at most {max_paths:,} histories, these models need up to {paths:,} "
            f"(V={vocabulary}, K={width}, {num_requests} requests, {length} tokens, {len(prompts)} batches)"
        )
    reads = inputs_read(policy, num_requests, width)
    if not reads & {"acceptance", "survival"}:
        estimator = None  # whatever it learns, nobody looks
    policy_codec, policy_state = state_codec(policy.init())
    estimator_codec, estimator_state = (None, np.zeros((1, 0), np.uint8))
    if estimator is not None:
        estimator_codec, estimator_state = state_codec(estimator.init())
    setting = Setting(
        policy=policy,
        estimator=estimator,
        draft=draft,
        target=target,
        scheme=scheme,
        rule=rule,
        refill=refill,
        prompts=prompts,
        num_drafts=np.asarray(drafts, np.int32),
        width=width,
        num_tokens=length,
        vocabulary=vocabulary,
        names=_feature_names(reads, estimator, feature_names),
        forgets=tuple(name for name in ("last_accepted", "last_tested") if name not in reads),
        policy_codec=policy_codec,
        estimator_codec=estimator_codec,
    )
    law, enumerated = _enumerate(setting, Tables(policy_state, estimator_state), num_rounds)
    return OutputLaw(law, _target_law(setting), length, vocabulary, enumerated)


def total_variation(p, q=None):
    """Total variation, half the sum of |p - q|.

    Args:
      p: an `OutputLaw`, compared with its target; or a law, float [...].
      q: the other law, of the shape of p; None with an `OutputLaw`.

    Returns:
      float64 [M], one for each batch of an `OutputLaw`; or a float.

    Raises:
      ValueError: shapes differ.
    """
    if isinstance(p, OutputLaw):
        return 0.5 * np.abs(p.law - p.target).reshape(len(p.law), -1).sum(axis=1)
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    if p.shape != q.shape:
        raise ValueError(f"q: expected shape {list(p.shape)}, got {list(q.shape)}")
    return float(0.5 * np.abs(p - q).sum())


def largest_bias(output: OutputLaw, *, tolerance: float = 1e-12) -> Bias:
    """The prefix whose probability is furthest from the target's, over batches, requests and lengths 1..n.

    Args:
      output: of `exact_output_law`.
      tolerance: with R > 1, if no prefix of any one request is off by more, the joint sequences are compared.
    """
    found = [
        bias
        for request, length in itertools.product(range(output.law.ndim - 1), range(1, output.num_tokens + 1))
        for bias in [_largest_marginal_bias(output, request, length)]
    ]
    worst = max(found, key=_size)
    if output.law.ndim == 2 or _size(worst) > tolerance:
        return worst
    index = np.unravel_index(np.argmax(np.abs(output.law - output.target)), output.law.shape)
    tokens = tuple(_sequence_of(i, output.num_tokens, output.vocabulary) for i in index[1:])
    joint = Bias(int(index[0]), None, tokens, float(output.law[index]), float(output.target[index]))
    return joint if _size(joint) > tolerance else worst


def estimated_paths(
    policy: Policy,
    *,
    rule: str,
    num_draft_tokens: int,
    num_tokens: int,
    vocabulary: int,
    num_batches: int = 1,
    num_requests: int = 1,
    num_rounds: int | None = None,
    drafter: str | Scheme = "autoregressive",
    estimator: AcceptanceEstimator | None = None,
    refill: str = "block",
    num_drafts=None,
) -> int:
    """An upper bound on the histories that `exact_output_law` enumerates, whatever the policy decides.

    The number of branches, with the worst number of tested drafts in every round; and if nothing is remembered but
    tokens, the number of sequences times the branches of a round, which is usually far less.

    Args:
      vocabulary: V.
      num_batches: M.
      policy, rule, num_draft_tokens, num_tokens, num_requests, num_rounds, drafter, estimator, refill, num_drafts: as
        there.

    Raises:
      TypeError, ValueError: as there.
    """
    reads = inputs_read(policy, num_requests, num_draft_tokens)
    looks = reads & {"acceptance", "survival"}
    memory = state_codec(policy.init())[1].size or (estimator is not None and looks)
    ages = rule == "deferred" and refill == "eager"  # kept drafts of several blocks
    return num_batches * bound_on_paths(
        rule=one_of("rule", rule, RULES),
        refill=one_of("refill", refill, ("block", "eager")),
        num_drafts=_num_drafts(num_drafts, num_requests, num_draft_tokens),
        num_tokens=num_tokens,
        vocabulary=vocabulary,
        num_rounds=num_rounds,
        point_mass=as_scheme(drafter).drafter == "point_mass",
        memoryless=not memory and not ages,
        sees_verdicts=bool(reads & {"last_accepted", "last_tested"}),
    )


def _enumerate(setting: Setting, tables: Tables, num_rounds: int | None):
    """The law [M, V^n, ...], and the number of rows that were made."""
    batches, requests = setting.prompts.shape[:2]
    size = setting.vocabulary**setting.num_tokens
    law = np.zeros((batches, *[size] * requests))
    worlds = first_worlds(
        batches, requests, setting.num_tokens, setting.width, setting.vocabulary, len(setting.names)
    )  # fmt: skip
    blocks = 1 if setting.scheme.drafter == "point_mass" else setting.vocabulary ** int(setting.num_drafts.sum())
    at_once = max(1, _ROWS_AT_ONCE // blocks)
    enumerated, rounds = 0, 0
    while len(worlds.weight) and rounds != num_rounds:
        parts = []
        for start in range(0, len(worlds.weight), at_once):
            played = play_round(setting, take(worlds, slice(start, start + at_once)), tables)
            _add_to(law, played.finished, setting)
            enumerated += played.num_paths
            if len(played.going_on.weight):
                parts.append((played.going_on, played.tables))
        worlds, tables = join(parts) if parts else (take(worlds, slice(0)), tables)
        worlds = merge(worlds) if len(parts) > 1 else worlds
        rounds += 1
    for start in range(0, len(worlds.weight), at_once):
        finished = last_round(setting, take(worlds, slice(start, start + at_once)))
        _add_to(law, finished, setting)
        enumerated += len(finished.weight)
    return law, enumerated


def _add_to(law: np.ndarray, worlds: Worlds, setting: Setting):
    """Adds the weights of finished worlds to the law, in place."""
    digits = setting.vocabulary ** np.arange(setting.num_tokens - 1, -1, -1)
    index = (worlds.batch, *np.moveaxis(worlds.tokens @ digits, 1, 0))
    law += np.bincount(np.ravel_multi_index(index, law.shape), worlds.weight, minlength=law.size).reshape(law.shape)


def _target_law(setting: Setting) -> np.ndarray:
    """The promised joint law [M, V^n, ...]: requests are independent."""
    batches, requests, start = setting.prompts.shape
    promised = setting.scheme.promised or setting.scheme.target
    law = np.ones((batches, *[1] * requests))
    for request in range(requests):
        own, tokens = np.ones((batches, 1)), np.full((batches, start + setting.num_tokens), -1, np.int32)
        tokens[:, :start] = setting.prompts[:, request]
        for index in range(setting.num_tokens):
            p = promised(np.asarray(setting.target(tokens, np.full(len(tokens), start + index)), np.float64))
            own = (own[:, :, None] * p.reshape(batches, -1, setting.vocabulary)).reshape(batches, -1)
            tokens = np.repeat(tokens, setting.vocabulary, axis=0)
            tokens[:, start + index] = np.tile(np.arange(setting.vocabulary), len(p))
        axes = [-1 if axis == request else 1 for axis in range(requests)]
        law = law * own.reshape(batches, *axes)
    return law


def _prompts(prompts, num_requests) -> np.ndarray:
    """int32 [M, R, P], checked."""
    prompts = np.asarray(prompts)
    if not np.issubdtype(prompts.dtype, np.integer):
        raise TypeError(f"prompts: expected an integer dtype, got {prompts.dtype}")
    if prompts.ndim == 2:
        prompts = np.repeat(prompts[:, None, :], num_requests, axis=1)
    if prompts.ndim != 3 or prompts.shape[1] != num_requests or not prompts.size:
        raise ValueError(f"prompts: expected shape [M, P] or [M, R={num_requests}, P], got {list(prompts.shape)}")
    return prompts.astype(np.int32)


def _num_drafts(num_drafts, num_requests, width) -> tuple[int, ...]:
    """K_r of every request, checked."""
    values = (width,) * num_requests if num_drafts is None else tuple(int(k) for k in num_drafts)
    if len(values) != num_requests or not all(0 <= k <= width for k in values):
        raise ValueError(f"num_drafts: expected R={num_requests} numbers in 0..K={width}, got {list(values)}")
    return values


def _feature_names(reads, estimator, feature_names) -> tuple[str, ...]:
    """Features that somebody reads, in the order of `FEATURES`."""
    wanted = {*feature_names, *(name for name in reads if name in FEATURES)}
    if reads & {"acceptance", "survival"}:
        wanted |= set(("logit_q_max",) if estimator is None else estimator.features)
    for name in wanted:
        one_of("feature_names", name, FEATURES)
    return tuple(name for name in FEATURES if name in wanted)


def _largest_marginal_bias(output, request, length) -> Bias:
    """The largest bias of one request's prefixes of one length."""
    others = tuple(1 + r for r in range(output.law.ndim - 1) if r != request)
    shape = (len(output.law), output.vocabulary**length, -1)
    law, target = (each.sum(axis=others).reshape(shape).sum(axis=2) for each in (output.law, output.target))
    batch, index = np.unravel_index(np.argmax(np.abs(law - target)), law.shape)
    tokens = _sequence_of(index, length, output.vocabulary)
    return Bias(int(batch), request, tokens, float(law[batch, index]), float(target[batch, index]))


def _sequence_of(index, length, vocabulary) -> tuple[int, ...]:
    """The tokens of a sequence by its number in lexicographic order."""
    return tuple(int(index) // vocabulary ** (length - 1 - i) % vocabulary for i in range(length))


def _size(bias) -> float:
    return abs(bias.probability - bias.target_probability)
