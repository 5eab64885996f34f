"""The names of horovod.tensorflow.keras."""

# Tests: hvdx/keras/callbacks.py, hvdx/keras/horovod/api.py
# Tests: hvdx/keras/horovod/collectives.py, hvdx/keras/horovod/distributed_optimizer.py
# Tests: hvdx/keras/horovod/objects.py

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx.keras as hvd
from hvdx.comm import world
from hvdx.errors import ConfigError, ReplicaError
from tests.ranks import models


@pytest.mark.sizes(1, 2, 4)
def test_functions_agree_with_numpy():
    size, rank = hvd.size(), hvd.rank()
    assert hvd.is_initialized()
    assert 0 <= hvd.local_rank() < hvd.local_size()
    assert 0 <= hvd.cross_rank() < hvd.cross_size()
    mean = (size - 1) / 2
    assert float(hvd.allreduce(float(rank))) == pytest.approx(mean)
    assert float(hvd.allreduce(float(rank), average=False)) == pytest.approx(mean * size)
    assert float(hvd.allreduce(float(rank), op=hvd.Sum, prescale_factor=2.0)) == pytest.approx(2 * mean * size)
    assert float(hvd.allreduce(float(rank), postscale_factor=0.5)) == pytest.approx(mean / 2)
    np.testing.assert_array_equal(hvd.allgather([[rank]]).numpy().ravel(), range(size))
    np.testing.assert_array_equal(hvd.broadcast([rank, 7], size - 1).numpy(), [size - 1, 7])
    assert hvd.broadcast_object({"rank": rank}, size - 1) == {"rank": size - 1}
    for variable in (keras.Variable(float(rank)), tf.Variable(float(rank))):
        assert float(hvd.allreduce(variable)) == pytest.approx(mean)
    variables = [keras.Variable(float(rank)), tf.Variable([float(rank)])]
    hvd.broadcast_variables(variables, root_rank=size - 1)
    assert [float(np.ravel(v.numpy())[0]) for v in variables] == [size - 1.0] * 2


@pytest.mark.sizes(1, 2)
def test_arguments_are_those_of_both_modules_of_horovod():
    rank, size = hvd.rank(), hvd.size()
    total = float(sum(range(size)))
    one = tf.constant([float(rank)])
    for result in (
        hvd.allreduce(one, False),
        hvd.allreduce(one, "a name", False),
        hvd.allreduce(tensor=one, op=hvd.Sum, device_dense="/cpu:0", name="a name", ignore_name_scope=True),
        hvd.allreduce(value=one, op=hvd.Sum, compression=hvd.Compression.none),
        hvd.grouped_allreduce([one], False)[0],
        hvd.allreduce(one, True, prescale_factor=size),
    ):
        assert result.numpy().tolist() == [total]
    assert (
        float(hvd.allreduce(float(rank), "a name")) == float(hvd.allreduce(rank * 1.0, "a name", None)) == total / size
    )
    with pytest.raises(ConfigError, match="by their names"):
        hvd.allreduce(one, "a name", False, 0.5)
    assert hvd.allgather(tensor=one, name="a name").numpy().tolist() == [float(r) for r in range(size)]
    assert hvd.broadcast(tensor=one, root_rank=size - 1, name="a name").numpy().tolist() == [size - 1.0]
    assert hvd.broadcast_object({"rank": rank}, size - 1, session=None, name="a name") == {"rank": size - 1}
    assert hvd.broadcast_object_fn(size - 1)(rank) == size - 1
    assert hvd.allgather_object(rank, session=None) == list(range(size))
    variables = [keras.Variable([float(rank)]), tf.Variable(rank)]
    assert [v.numpy().tolist() for v in hvd.broadcast_(variables, size - 1)] == [[size - 1.0], size - 1]
    assert [np.ravel(v.numpy()).tolist() for v in variables] == [[size - 1.0], [size - 1]]
    variables[1].assign(rank)
    hvd.broadcast_variables(variables, size - 1, inplace=True)
    assert int(variables[1]) == size - 1
    whole = np.arange(2.0 * size)
    part = hvd.reducescatter(whole, op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0, name="a name")
    assert part.numpy().tolist() == (size * whole[2 * rank : 2 * rank + 2]).tolist()
    (part,) = hvd.grouped_reducescatter([whole.astype("int32")], prescale_factor=0.5)
    assert part.numpy().tolist() == [rank * 2 // 2, (rank * 2 + 1) // 2]
    ops = hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op()
    assert [int(op) for op in ops] == [rank, size, hvd.local_rank(), hvd.local_size(), 1]


def test_integers_are_multiplied_by_a_factor_and_summed_as_integers():
    """Horovod multiplies in float64 and drops the fraction, before the sum and after it."""
    size, mine = hvd.size(), tf.constant([10, 20, 31])
    for dtype in (tf.int32, tf.int64, tf.uint8):
        value = tf.cast(mine, dtype)
        assert hvd.allreduce(value, prescale_factor=0.5).numpy().tolist() == [5, 10, 15]
        assert hvd.allreduce(value, op=hvd.Sum, postscale_factor=0.5).numpy().tolist() == [5 * size, 10 * size, 31]
        assert hvd.allreduce(value).dtype == dtype
    large = 2**53 + 1
    assert hvd.allreduce(tf.constant(large, tf.int64), op=hvd.Sum).numpy() == size * large
    assert hvd.allreduce(tf.constant([hvd.rank(), 1]), op=hvd.Average).numpy().tolist() == [0, 1]


@pytest.mark.parametrize(("op", "expected"), [(hvd.Min, [0, 1]), (hvd.Max, [1, 2]), (hvd.Product, [0, 2])])
def test_other_reductions_agree_with_numpy(op, expected):
    for dtype in (tf.uint8, tf.int64, tf.float16, tf.float32):
        mine = tf.cast([hvd.rank(), 1 + hvd.rank()], dtype)
        got = (hvd.allreduce(mine, op=op), *hvd.grouped_allreduce([mine, mine], op=op))
        for result in got:
            assert result.dtype == dtype
            assert result.numpy().tolist() == expected
    with tf.GradientTape() as tape:
        tape.watch(mine)
        loss = hvd.allreduce(mine, op=op)
    with pytest.raises(NotImplementedError, match="stop_gradient"):
        tape.gradient(loss, mine)


@pytest.mark.sizes(1, 2)
def test_rows_are_gathered():
    rank, size = hvd.rank(), hvd.size()
    rows = tf.IndexedSlices(tf.fill([1 + rank, 2], 1.0 + rank), [0] * (1 + rank))
    for got in (hvd.allreduce(rows, op=hvd.Sum), hvd.grouped_allreduce([1.0, rows], average=False)[1]):
        assert got.values.numpy().tolist() == [[1.0 + r] * 2 for r in range(size) for _ in range(1 + r)]
        assert got.indices.numpy().tolist() == [0] * sum(1 + r for r in range(size))
        assert got.dense_shape is None
    np.testing.assert_allclose(hvd.allreduce(rows).values[0], [1.0 / size] * 2)
    for call in (
        lambda: hvd.allreduce(rows, op=hvd.Min),
        lambda: hvd.allreduce(rows, prescale_factor=0.5),
        lambda: hvd.allgather(rows),
        lambda: hvd.broadcast(rows, 0),
    ):
        with pytest.raises(NotImplementedError, match="IndexedSlices"):
            call()


@pytest.mark.graph
@pytest.mark.parametrize("traced", [True, False])
def test_gradients_are_horovods(traced, engine):
    rank, size = hvd.rank(), hvd.size()
    unknown = tf.TensorSpec([None]) if traced else None

    def gradients(value, splits):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(value)
            results = [
                hvd.allreduce(value, op=hvd.Sum, prescale_factor=3.0),
                hvd.allgather(value[: 1 + rank]),
                hvd.broadcast(value, 1),
                hvd.alltoall(value),
                hvd.alltoall(value, splits)[0],
                hvd.reducescatter(value),
                hvd.grouped_reducescatter([value, value], op=hvd.Sum, postscale_factor=0.5)[1],
            ]
            # The upstream gradient of a rank is the rank + 1.
            losses = [(rank + 1.0) * tf.reduce_sum(result) for result in results]
        return [tape.gradient(loss, value) for loss in losses]

    value, splits = tf.constant([1.0, 2.0]), tf.constant([2, 0])
    if traced:
        gradients = tf.function(gradients, input_signature=[unknown, tf.TensorSpec([2], tf.int32)])
    got = [gradient.numpy().tolist() for gradient in gradients(value, splits)]
    total, mean = float(sum(range(1, size + 1))), (size + 1) / 2
    assert got == [
        [3 * total] * 2,
        [mean, mean if rank else 0.0],
        [mean if rank == 1 else 0.0] * 2,
        [1.0, 2.0],
        [1.0, 1.0],
        [1.0, 2.0],
        [0.5 * size, 0.5 * size * 2],
    ]


def test_compressors_have_horovods_functions():
    for dtype in (tf.float32, tf.float64, tf.int32):
        narrow, context = hvd.Compression.fp16.compress(tf.ones([2], dtype))
        assert narrow.dtype == (tf.float16 if dtype.is_floating else dtype)
        assert hvd.Compression.fp16.decompress(narrow, context).dtype == dtype
    assert hvd.Compression.none.compress(tf.ones([2]))[0].dtype == tf.float32

    class Halves:
        def compress(self, tensor):
            return tensor / 2, 2.0

        def decompress(self, tensor, context):
            return tensor * context

    assert float(hvd.allreduce(3.0, compression=Halves())) == 3.0


def test_different_calls_raise_horovods_class_on_all_ranks():
    rank = hvd.rank()
    for call in (
        lambda: hvd.allreduce(tf.zeros([2 + rank])),
        lambda: hvd.allreduce(tf.zeros([2], tf.float32 if rank else tf.float64)),
        lambda: hvd.allreduce(tf.zeros([2]), name=f"name {rank}"),
        lambda: hvd.allgather(tf.zeros([2, 2 + rank])),
        lambda: hvd.broadcast(tf.zeros([2]), rank),
        lambda: hvd.alltoall(tf.zeros([2], tf.float32 if rank else tf.int32)),
        lambda: hvd.reducescatter(tf.zeros([2 + rank])),
    ):
        with pytest.raises(tf.errors.FailedPreconditionError, match="same call on all ranks") as caught:
            call()
        assert isinstance(caught.value, ReplicaError)
    for call in (hvd.allgather, hvd.reducescatter, hvd.alltoall):
        with pytest.raises(tf.errors.InvalidArgumentError, match="scalar"):
            call(1.0)


def test_horovods_own_constants_are_accepted():
    if hvd.size() == 1:
        pytest.skip("needs Horovod's library, which a world of one does not start")
    import horovod.tensorflow as stock

    assert float(hvd.allreduce(1.0, op=stock.Sum)) == hvd.size()
    assert float(hvd.allreduce(1.0, op=stock.Average, compression=stock.Compression.fp16)) == 1.0
    assert float(hvd.allreduce(float(hvd.rank()), op=stock.Max)) == hvd.size() - 1
    with pytest.raises(ConfigError, match="op"):
        hvd.allreduce(1.0, op=stock.Adasum)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: hvd.init(comm=[0]), "comm"),
        (lambda: hvd.allreduce(1.0, op=hvd.Adasum), "op"),
        (lambda: hvd.allreduce(1.0, op=hvd.Sum, average=True), "not both"),
        (lambda: hvd.allreduce(1.0, compression="gzip"), "compression"),
        (lambda: hvd.broadcast(1.0, root_rank=99), "root_rank"),
        (lambda: hvd.broadcast_global_variables(0), "broadcast_variables"),
        (lambda: hvd.load_model("x.keras", legacy_opts=True), "legacy_opts"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), process_set=object()), "process_set"),
        (lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[1.0]), "local variables"),
        (lambda: hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=[3]), "local_layers"),
        (lambda: hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=keras.layers.Dense(1)), "built"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), strategy="threshold").register_local_var([]), "AllR"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Adasum), "op"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), groups=[[object()]]), "groups"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), groups=0), "groups"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0), "backward_passes"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), gradient_predivide_factor=2.0, op=hvd.Sum), "prediv"),
        (lambda: hvd.DistributedGradientTape(tf.GradientTape(), process_set=object()), "process_set"),
        (lambda: hvd.elastic, "elastic"),
        (lambda: hvd.callbacks.MetricAverageCallback(device="/gpu:0"), "device"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(call, named):
    with pytest.raises(ConfigError, match=named):
        call()


@pytest.mark.graph
@pytest.mark.sizes(1, 2)
def test_horovod_style_script_trains_like_one_process():
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9),
        name="mine",
        sparse_as_dense=True,
        gradient_predivide_factor=2.0,
        groups=2,
    )
    model = models.compiled(models.network(seed=hvd.rank()), optimizer)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = models.fit(model, callbacks, validation_data=models.data(8 + 8 * hvd.rank())).history
    reference = models.compiled(models.network(seed=0), keras.optimizers.SGD(0.1, momentum=0.9))
    expected = models.fit(reference, [], share=False).history
    models.assert_identical(model)
    models.assert_close(model, reference)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
    assert len(set(hvd.broadcast_object(history["val_loss"]))) == 2
    np.testing.assert_array_equal(hvd.broadcast_object(history["val_loss"]), history["val_loss"])


def test_more_functions_agree_with_numpy():
    mine, every = float(hvd.rank()), range(hvd.size())
    a, b = hvd.grouped_allreduce([[mine, 1.0], mine], op=hvd.Sum)
    np.testing.assert_allclose(a, [sum(every), hvd.size()])
    assert float(b) == sum(every)
    a, b = hvd.grouped_allgather([[mine], [[mine, 2.0]]])
    np.testing.assert_array_equal(a, every)
    np.testing.assert_array_equal(b, [[r, 2.0] for r in every])
    rows = 2 * hvd.size() + 1
    part = hvd.reducescatter(mine + np.arange(rows)[:, None], op=hvd.Sum)
    whole = sum(r + np.arange(rows)[:, None] for r in every)
    begin = 2 * hvd.rank() + min(hvd.rank(), 1)
    np.testing.assert_allclose(part, whole[begin : begin + 2 + (hvd.rank() == 0)])
    assert hvd.allgather_object({"rank": hvd.rank()}) == [{"rank": r} for r in every]
    assert hvd.grouped_allreduce([]) == []
    for call in (hvd.grouped_allgather, hvd.grouped_allreduce, hvd.reducescatter):
        with pytest.raises(ConfigError, match="process_set"):
            call([1.0], process_set=type("Some", (), {"process_set_id": 3}))


@pytest.mark.sizes(1, 2)
def test_queries_return_horovods_answers():
    assert hvd.mpi_built()
    assert hvd.mpi_enabled() == hvd.mpi_threads_supported() == (hvd.size() > 1)
    assert not hvd.gloo_enabled()
    assert (hvd.nccl_built(), hvd.cuda_built(), hvd.rocm_built(), hvd.ddl_built(), hvd.ccl_built()) == (0, *[False] * 4)
    assert hvd.is_homogeneous()


@pytest.fixture(params=["mpi", "horovod"])
def engine(request, monkeypatch):
    """Choose the engine of the functions, which is Horovod where NCCL sends the tensors of GPUs."""
    monkeypatch.setattr(world, "_chosen", request.param)


@pytest.mark.graph(every=True)
def test_collectives_inside_a_function(engine):
    """As in Horovod's example of a custom loop, the first step broadcasts the model and the optimiser."""
    model = models.network(seed=hvd.rank())
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    for variable in optimizer.variables:
        variable.assign(tf.cast(tf.fill(variable.shape, hvd.rank()), variable.dtype))

    @tf.function
    def first_step(value):
        hvd.broadcast_variables(model.variables, 0)
        hvd.broadcast_variables(optimizer.variables, 0)
        return hvd.broadcast(value, 1), hvd.broadcast(value + 1, 1), hvd.allreduce(value) + hvd.allreduce(2 * value)

    expected = hvd.broadcast_object(model.get_weights(), 0)
    a, b, c = first_step(tf.constant(float(hvd.rank())))
    assert (float(a), float(b)) == (1.0, 2.0)
    assert float(c) == pytest.approx(3 * (hvd.size() - 1) / 2)
    for mine, its in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(mine, its)
    assert all(not v.numpy().any() for v in optimizer.variables)


def test_warmup_raises_the_rate_and_corrects_momentum():
    rates = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    model = models.compiled(models.network(seed=0), keras.optimizers.SGD(0.4, momentum=0.9))
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)
    x, y = models.data(16)
    history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[warmup, Note()]).history
    size, per_epoch = hvd.size(), 4
    for i in range(2 * per_epoch):
        epoch = (i + 1) / per_epoch
        assert rates[i] == pytest.approx(0.4 / size * (epoch * (size - 1) / 2 + 1), rel=1e-5)
    assert rates[-1] == pytest.approx(0.4)
    assert history["lr"][-1] == pytest.approx(0.4)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction_is_horovods(nesterov):
    """Compare with one step by hand: m' = m new / old, v <- m' v - new g, with Nesterov w <- w + m' v - new g."""
    model = models.compiled(models.network(seed=0), keras.optimizers.SGD(0.1, momentum=0.5, nesterov=nesterov))
    x, y = models.data(8)
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: [1.0, 3.0][int(epoch)])
    model.fit(x, y, batch_size=8, epochs=1, verbose=0, callbacks=[schedule])
    before = [v.numpy() for v in model.optimizer.momentums]
    weights = [v.numpy() for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = model.compute_loss(y=y, y_pred=model(x))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    model.fit(x, y, batch_size=8, initial_epoch=1, epochs=2, verbose=0, callbacks=[schedule])
    for i, gradient in enumerate(gradients):
        velocity = 0.5 * 3.0 * before[i] - 0.3 * gradient.numpy()
        np.testing.assert_allclose(model.optimizer.momentums[i].numpy(), velocity, rtol=1e-4, atol=1e-6)
        step = 0.5 * 3.0 * velocity - 0.3 * gradient.numpy() if nesterov else velocity
        np.testing.assert_allclose(model.trainable_variables[i].numpy(), weights[i] + step, rtol=1e-4, atol=1e-6)


def test_evaluate_returns_metrics_over_all_samples():
    model = models.compiled(models.network(seed=0), keras.optimizers.SGD(0.1), metrics=["accuracy"])
    x, y = models.data()
    # Unequal numbers of samples, so a mean of the ranks' values is wrong.
    mine = slice(0, 4) if hvd.rank() == 0 else slice(4, None)
    average = hvd.callbacks.MetricAverageCallback()
    found = model.evaluate(x[mine], y[mine], batch_size=4, verbose=0, return_dict=True, callbacks=[average])
    expected = model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, rel=1e-5)
    here = model.evaluate(x[mine], y[mine], batch_size=4, verbose=0, return_dict=True)
    assert here != pytest.approx(expected, rel=1e-5)


@pytest.mark.graph
def test_xla_is_refused_with_a_remedy():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = models.compiled(models.network(seed=0), optimizer, jit_compile=True)
    with pytest.raises(ConfigError, match=r"jit_compile.*BroadcastGlobalVariablesCallback"):
        models.fit(model, [], epochs=1)


def test_schedule_refuses_a_rate_that_cannot_be_set():
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model = models.compiled(models.network(), keras.optimizers.SGD(decay))
    with pytest.raises(ConfigError, match="learning rate"):
        models.fit(model, [hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)])


@pytest.mark.sizes(1, 2)
def test_load_model_keeps_the_state(tmp_path):
    model = models.compiled(models.network(seed=0), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    models.fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = hvd.load_model(path)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations)
    for each in (model, loaded):
        models.fit(each, [])
    models.assert_identical(loaded)
    models.assert_close(loaded, model)


@pytest.mark.sizes(1)
def test_load_model_refuses_an_optimizer_that_keras_did_not_restore(tmp_path):
    models.compiled(models.network(), keras.optimizers.SGD(0.1)).save(tmp_path / "model.h5")
    with pytest.raises(ConfigError, match=r"model\.h5.*\.keras"):
        hvd.load_model(tmp_path / "model.h5")


@pytest.mark.sizes(1, 2)
def test_best_model_checkpoint_saves_on_rank_0(tmp_path):
    model = models.compiled(models.network(seed=0), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ConfigError, match="filepath"):
        models.fit(model, [best])
    best.filepath = str(tmp_path / "best.keras")
    models.fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0), best])
    assert (tmp_path / "best.keras").exists() == (hvd.rank() == 0)


def test_broadcast_variables_refuses_other_shapes():
    variables = [keras.Variable(np.zeros(2 + hvd.rank()))]
    if hvd.size() > 1:
        with pytest.raises(ReplicaError, match="differ"):
            hvd.broadcast_variables(variables, 0)


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("graph", [False, True])
def test_tape_takes_keras_variables_alone_or_in_a_structure(graph):
    rank, size = hvd.rank(), hvd.size()
    a, b, idle = keras.Variable(2.0), tf.Variable([1.0, 2.0]), keras.Variable(1.0)

    def step():
        with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
            loss = (rank + 1.0) * (a * a + tf.reduce_sum(b))
        return tape.gradient(loss, a), tape.gradient(loss, {"x": [a, b], "y": idle})

    single, nested = (tf.function(step) if graph else step)()
    mean = (size + 1) / 2
    assert float(single) == pytest.approx(4 * mean)
    assert float(nested["x"][0]) == pytest.approx(4 * mean)
    np.testing.assert_allclose(nested["x"][1].numpy(), [mean, mean], rtol=1e-6)
    assert nested["y"] is None


def test_tape_reads_the_environment_and_refuses_a_second_strategy(monkeypatch):
    monkeypatch.setenv("HVDX_STRATEGY", "all_reduce:op=sum")
    variable = keras.Variable(3.0)
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = 2.0 * variable
    assert float(tape.gradient(loss, variable)) == pytest.approx(2.0 * hvd.size())
    with pytest.raises(ConfigError, match="both given"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, strategy="all_reduce")


@pytest.mark.sizes(2, 4)
def test_tape_sums_with_op_sum():
    variable = keras.Variable(3.0)
    with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
        loss = 2.0 * variable
    assert float(tape.gradient(loss, [variable])[0]) == pytest.approx(2.0 * hvd.size())
