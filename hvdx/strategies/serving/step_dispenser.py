"""Deals out the steps of an epoch to whoever is ready for the next."""


class StepDispenser:
    """Gives out a round's tickets, each once, in the order in which workers ask.

    Example:
        >>> dispenser = StepDispenser()
        >>> [dispenser.ask(round_=1, tickets=2) for _ in range(3)]
        [(True, 1, False), (True, 2, False), (False, 2, False)]
    """

    def __init__(self) -> None:
        self._round = self._given = 0
        self._stopped = False

    def ask(self, round_: int, tickets: int, stop: bool = False) -> tuple[bool, int, bool]:
        """May another step be taken?

        Args:
            round_: rounds follow each other; a new one begins when it is asked for first.
            tickets: in a round; as many for all who ask.
            stop: who asks wants no more steps to be taken in this round, by anybody.

        Returns:
            Whether it may, how many tickets the round has given out, and whether somebody has stopped it.
        """
        if round_ > self._round:
            self._round, self._given, self._stopped = round_, 0, False
        current = round_ == self._round
        # A round that is over needs no stopping.
        self._stopped = self._stopped or (stop and current and self._given < tickets)
        granted = current and not self._stopped and self._given < tickets
        self._given += granted
        return granted, self._given, self._stopped
