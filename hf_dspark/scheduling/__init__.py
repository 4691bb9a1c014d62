"""How much to draft and to verify: pure functions of confidences, costs and history that know no model."""

from .calibration import (
    auroc,
    auroc_histogram,
    brier,
    calibrate,
    calibration_report,
    ece,
    fit_sequential_temperatures,
    prefix_predictions,
    reliability_bins,
)
from .copying import CopyExpectation
from .cost import CostTable, LatencyCurve, OnlineCost, machine_key, profile
from .gate import OnlineGate, break_even
from .headless import (
    draft_features,
    fit_survival,
    legal_features,
    predict_confidence,
    step_features,
    survival_logits,
)
from .prefix import LaggedScheduler, algorithm1, allocate, capacity, confidence_prefix, lookahead, survival, throughput
from .throttle import AcceptanceHistory, DraftState, DraftThrottle, draft_length, next_state, worth_drafting

__all__ = [
    "AcceptanceHistory",
    "CopyExpectation",
    "CostTable",
    "DraftState",
    "DraftThrottle",
    "LaggedScheduler",
    "LatencyCurve",
    "OnlineCost",
    "OnlineGate",
    "algorithm1",
    "allocate",
    "auroc",
    "auroc_histogram",
    "break_even",
    "brier",
    "calibrate",
    "calibration_report",
    "capacity",
    "confidence_prefix",
    "draft_features",
    "draft_length",
    "ece",
    "fit_sequential_temperatures",
    "fit_survival",
    "legal_features",
    "lookahead",
    "machine_key",
    "next_state",
    "predict_confidence",
    "prefix_predictions",
    "profile",
    "reliability_bins",
    "step_features",
    "survival",
    "survival_logits",
    "throughput",
    "worth_drafting",
]
