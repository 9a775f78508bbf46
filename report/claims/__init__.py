"""The paper's claims: what it says, the command that checks it, ours, and a verdict computed from recorded rows."""
