"""Deals out the steps of an epoch to whoever is ready for the next."""


class Turnstile:
    """Gives out a round's tickets, each once, in the order in which workers ask.

    Example:
        >>> turnstile = Turnstile()
        >>> [turnstile.ask(round_=1, tickets=2) for _ in range(3)]
        [(True, 1), (True, 2), (False, 2)]
    """

    def __init__(self) -> None:
        self._round = self._given = 0

    def ask(self, round_: int, tickets: int) -> tuple[bool, int]:
        """May another step be taken?

        Args:
            round_: rounds follow each other; a new one begins when it is asked for first.
            tickets: in a round; as many for all who ask.

        Returns:
            Whether it may, and how many tickets the round has given out.
        """
        if round_ > self._round:
            self._round, self._given = round_, 0
        granted = round_ == self._round and self._given < tickets
        self._given += granted
        return granted, self._given
