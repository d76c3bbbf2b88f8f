"""The verbs: `plan`, policies auto and paper, and the rules that a plan consists of."""
