"""What makes a query's result from keys and values. Each mixer says once what it cannot do: with positions, scores and
dropout when its layer is made (`check`), with caches and memory when it is called."""

from headway.nn.mixers.base import Call, Mixer, Projections
from headway.nn.mixers.global_queries import GlobalMixer
from headway.nn.mixers.linear_attention import LinearMixer
from headway.nn.mixers.softmax import SoftmaxMixer

__all__ = ["Call", "GlobalMixer", "LinearMixer", "Mixer", "Projections", "SoftmaxMixer"]
