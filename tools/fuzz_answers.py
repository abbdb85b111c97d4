"""How `tools.fuzz` compares two answers: token by token, up to rounding and ties."""

from looseleaf.engine.reports.outputs import RequestOutput

# how far rounding may move a log-probability, and how close two tokens have to be for a tie:
# an order of sums may turn one of them over
_AWAY, _TIE = 3e-3, 2e-3


def differs(
    got: RequestOutput, right: RequestOutput, slack: float = 1, *, any_tie: bool = False
) -> str | None:
    """How an answer differs by more than ``slack`` times rounding, None if it does not: up to the
    first token that is another one as likely, or with ``any_tie`` any other."""
    for output, expected in zip(got.outputs, right.outputs, strict=True):
        for entries, known in zip(output.logprobs or (), expected.logprobs or (), strict=False):
            first, likely = entries[0], {entry.token_id: entry.logprob for entry in known}
            if first.token_id != known[0].token_id:
                away = abs(likely.get(first.token_id, -1e9) - known[0].logprob)
                if any_tie or away < slack * _TIE:
                    break
                return f"{first} for {known[0]}"
            if abs(first.logprob - known[0].logprob) > slack * _AWAY:
                return f"{first} for {known[0]}"
        else:
            here, there = ((one.finish_reason, list(one.token_ids)) for one in (output, expected))
            if here != there:
                return f"{here} for {there}"
    return None
