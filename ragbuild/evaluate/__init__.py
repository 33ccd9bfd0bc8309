"""Evaluation: metrics, Q-DOC, answers, judges, bad cases, tuning, ledger and gates: every decision has a report."""
