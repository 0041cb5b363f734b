# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Acceptance tables
#
# What does a draft model's own law say about whether the target will accept a token? This notebook decodes a little
# held-out text with the shipped pair, replays the drafts prequentially (predict, then learn), and compares raw maximum
# probability with estimators, beside the ceilings that no predictor can beat. `make tables` does the same at full size.

# %%
import pathlib
import tempfile

import matplotlib.pyplot as plt

from experiments.collect import Settings, collect
from experiments.tables import predict_all, score
from specav import metrics

settings = Settings(num_batches=2, rounds=40, batch=16)
rounds = collect(settings, pathlib.Path(tempfile.mkdtemp()))
print(f"{rounds.valid.sum()} drafts, {rounds.labels.observed.sum()} of them observed")

# %% [markdown]
# ## Log-loss, AUC and calibration
#
# Prefix rows may not look at the drawn token, draw rows may (lossless under the coupled and the deferred rule).
# Observed slots only: the verdicts that a decoder sees. At this size estimators have hardly warmed up.

# %%
predictions = predict_all(rounds, settings.num_draft_tokens)
rows = score(predictions, rounds)
print(f"{'estimator':24s} {'class':8s} {'AUC':>6s} {'log-loss':>8s} {'ECE':>6s}")
for row in rows:
    if row["position"] == "all":
        print(f"{row['estimator']:24s} {row['class']:8s} {row['auc']:6.3f} {row['log_loss']:8.3f} {row['ece']:6.3f}")

# %% [markdown]
# ## Raw probability is not calibrated
#
# The share of drafts accepted against the prediction, in bins of equal mass.

# %%
figure, axes = plt.subplots(figsize=(5, 4), layout="constrained")
observed = rounds.labels.observed
for item in predictions:
    if item.name in ("raw q_max", "online logit_q_max", "online all five"):
        curve = metrics.reliability_curve(item.values[observed], rounds.labels.accepted[observed], kind="equal_mass")
        axes.plot(curve.mean_prediction, curve.mean_label, "o-", markersize=3, label=item.name)
axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
axes.set(xlabel="predicted", ylabel="accepted", title="Reliability")
axes.legend()
