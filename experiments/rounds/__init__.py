"""Rounds: phases 0 to 4, from the largest gap to a sealed champion."""
