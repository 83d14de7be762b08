"""Agents: what proposes candidates. They measure nothing and decide nothing."""
