"""A reward of your own: any function in TRL's calling convention."""


def closeness(completions, target, **kwargs):
    """1 for the target number, less the farther away the response is, and None where the row has no target."""
    return [score(text, want) for text, want in zip(completions, target, strict=True)]


def score(text, want):
    if want is None:
        return None
    digits = text.strip()
    if not digits.isdigit():
        return 0.0
    return 1.0 / (1.0 + abs(int(digits) - want))
