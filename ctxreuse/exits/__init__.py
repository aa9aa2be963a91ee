"""Early exits: tokens that leave a model before its last layers, within a budget of those that are then wrong."""

from ctxreuse.exits.controller import MOST_PENDING, ExitController, ExitGate, ExitState
from ctxreuse.exits.ledger import WINDOW, BudgetLedger, check_budget
from ctxreuse.exits.plan import ExitPlan, ExitRow, RampCost

__all__ = [
    "MOST_PENDING",
    "WINDOW",
    "BudgetLedger",
    "ExitController",
    "ExitGate",
    "ExitPlan",
    "ExitRow",
    "ExitState",
    "RampCost",
    "check_budget",
]
