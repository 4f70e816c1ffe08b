"""grpc's generic types with their parameters filled in.

The stubs call them generic, the classes at run time are not, so ``ServicerContext[Any, Any]`` can
only be written where it is never evaluated.
"""

from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    ServicerContext = grpc.aio.ServicerContext[Any, Any]
    ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
    RpcMethodHandler = grpc.RpcMethodHandler[Any, Any]
    GenericRpcHandler = grpc.GenericRpcHandler[Any, Any]
else:
    ServicerContext = grpc.aio.ServicerContext
    ServerInterceptor = grpc.aio.ServerInterceptor
    RpcMethodHandler = grpc.RpcMethodHandler
    GenericRpcHandler = grpc.GenericRpcHandler
