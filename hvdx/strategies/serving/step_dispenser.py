"""Distribution of an epoch's steps to the workers that are ready."""


class StepDispenser:
    """Dispenser of the steps of a round, which is an epoch. It hands out each step once, in the order of the requests.

    Example:
        >>> dispenser = StepDispenser()
        >>> [dispenser.ask(round_=1, steps=2) for _ in range(3)]
        [(True, 1, False), (True, 2, False), (False, 2, False)]
    """

    def __init__(self) -> None:
        self._round = self._handed_out = 0
        self._stopped = False

    def ask(self, round_: int, steps: int, stop: bool = False, known: int = 0) -> tuple[bool, int, bool]:
        """Request another step, or stop the round.

        Args:
            round_: number of the round. The first request with a higher number begins a new round.
            steps: number of steps in the round; the same in all requests.
            stop: end the round for all workers.
            known: number of steps that the worker knows to be handed out, by a dispenser before this one.

        Returns:
            Whether the step is granted, the number of steps handed out in the round, and whether the round was stopped.
        """
        if round_ > self._round:
            self._round, self._handed_out, self._stopped = round_, 0, False
        current = round_ == self._round
        if current:
            self._handed_out = max(self._handed_out, known)
        # A round without steps left is over, and cannot be stopped.
        self._stopped = self._stopped or (stop and current and self._handed_out < steps)
        granted = current and not self._stopped and self._handed_out < steps
        self._handed_out += granted
        return granted, self._handed_out, self._stopped
