"""`explain.distribution.communication`, under its public name."""

from explain.distribution.communication import READY, Codec, How, Ready, Recorder, Sent, communicate

__all__ = ["READY", "Codec", "How", "Ready", "Recorder", "Sent", "communicate"]
