"""Whether a model is the same on two machines: records of what it says as it is served, and their comparison.

It knows neither HTTP nor the terminal.
"""
