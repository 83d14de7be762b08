"""Loads of many requests: when they come, how they are served, figures."""
