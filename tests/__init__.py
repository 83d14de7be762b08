"""The test suite; its folders mirror the packages. Run from the root."""
