//! The loader: order, resume, shards, workers that fail, and what is uploaded by whom.

use kiln_data::{Array, DataError, DataLoader, Dataset, Image, Rows, Sequence, split};
use kiln_device::{Data, Decorator, Driver};
use kiln_tensor::{DType, Device, Tensor};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Sample i is i; some take longer than others.
struct Numbers {
    len: usize,
    asked: Arc<AtomicUsize>,
}

fn numbers(len: usize) -> Numbers {
    Numbers { len, asked: Arc::default() }
}

impl Dataset for Numbers {
    type Sample = i64;

    fn len(&self) -> usize {
        self.len
    }

    fn sample(&self, index: usize) -> Result<i64, DataError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_micros((index as u64 * 31) % 300));
        Ok(index as i64)
    }

    fn origin(&self, index: usize) -> Option<String> {
        Some(format!("number {index}"))
    }
}

fn values(batch: Result<Tensor, DataError>) -> Vec<i64> {
    batch.unwrap().to_vec().unwrap()
}

#[test]
fn every_number_of_workers_gives_the_same_batches() {
    let device = Device::cpu();
    let run = |workers: usize, prefetch: usize, epoch: u64| -> Vec<Vec<f32>> {
        let loader = DataLoader::new(numbers(53)).batch(7).shuffle(5).workers(workers).prefetch(prefetch);
        let loader = loader.transform(|number, random| [number as f32, random.uniform(), random.normal()]);
        loader.epoch(epoch).on(&device).map(|batch| batch.unwrap().to_vec().unwrap()).collect()
    };
    let alone = run(0, 1, 3);
    assert_eq!((alone.len(), alone[0].len(), alone[7].len()), (8, 21, 12));
    for (workers, prefetch) in [(1, 1), (2, 1), (3, 4), (20, 2)] {
        assert_eq!(run(workers, prefetch, 3), alone, "{workers} workers");
    }
    let order = |batches: &[Vec<f32>]| -> Vec<f32> { batches.concat().iter().step_by(3).copied().collect() };
    let mut all = order(&alone);
    assert_ne!(order(&run(0, 1, 4)), all);
    all.sort_by(f32::total_cmp);
    assert!(all.iter().copied().eq((0..53).map(|i| i as f32)));
}

/// A sample's random numbers change with the epoch, and are its own.
#[test]
fn random_numbers_belong_to_sample_and_epoch() {
    let loader = DataLoader::new(numbers(40)).batch(40).transform(|_, random| random.uniform());
    let draw = |epoch| -> Vec<f32> {
        let batch = loader.epoch(epoch).on(&Device::cpu()).next().unwrap();
        batch.unwrap().to_vec().unwrap()
    };
    let (first, second) = (draw(0), draw(1));
    assert_eq!(first, draw(0));
    assert!(first.iter().zip(&second).all(|(a, b)| a != b));
    assert!((1..40).all(|i| first[i] != first[0]));
}

#[test]
fn an_epoch_goes_on_at_any_sample() {
    let device = Device::cpu();
    let loader = DataLoader::new(numbers(23)).batch(5).shuffle(9).workers(2);
    let all: Vec<i64> = loader.epoch(2).on(&device).flat_map(values).collect();
    for position in 0..=23 {
        let rest: Vec<i64> = loader.epoch(2).resume(position).on(&device).flat_map(values).collect();
        assert_eq!(rest, all[position..]);
        assert_eq!(loader.epoch(2).resume(position).batches(), (23 - position).div_ceil(5));
    }
    let mut batches = loader.epoch(2).resume(3).on(&device);
    assert_eq!(batches.position(), 3);
    batches.next();
    assert_eq!(batches.position(), 8);
    batches.by_ref().for_each(drop);
    assert_eq!(batches.position(), 23);
}

#[test]
fn what_is_passed_over_is_not_loaded() {
    let (set, device) = (numbers(100), Device::cpu());
    let asked = set.asked.clone();
    let loader = DataLoader::new(set).batch(10);
    let mut batches = loader.epoch(0).resume(80).on(&device);
    assert_eq!(values(batches.next().unwrap())[0], 80);
    drop(batches);
    assert_eq!(asked.load(Ordering::Relaxed), 10);
}

#[test]
fn shards_are_parts_of_the_same_batches() {
    let device = Device::cpu();
    let whole = DataLoader::new(numbers(50)).batch(12).shuffle(4);
    let batches: Vec<Vec<i64>> = whole.epoch(1).on(&device).map(values).collect();
    for shards in [1, 2, 3, 12] {
        let part = |shard: usize| -> Vec<Vec<i64>> {
            whole.clone().shard(shard, shards).epoch(1).on(&device).map(values).collect()
        };
        let parts: Vec<_> = (0..shards).map(part).collect();
        // Two samples are left at the end: too few for three shards or more.
        let want = if shards <= 2 { 5 } else { 4 };
        assert!(parts.iter().all(|part| part.len() == want), "{shards}");
        for at in 0..want {
            let together: Vec<i64> = parts.iter().flat_map(|part| part[at].clone()).collect();
            assert_eq!(together, batches[at]);
        }
    }
}

#[test]
fn so_many_batches_come_as_are_announced() {
    let device = Device::cpu();
    for len in [0, 1, 5, 6, 12] {
        for batch in [1, 2, 5, 20] {
            for shards in [1, 2, 4] {
                for drop_last in [false, true] {
                    let mut loader =
                        DataLoader::new(vec![1.0f32; len]).batch(batch).shard(shards - 1, shards);
                    if drop_last {
                        loader = loader.drop_last();
                    }
                    let sizes: Vec<usize> = loader.on(&device).map(|batch| batch.unwrap().dim(0)).collect();
                    assert_eq!(sizes.len(), loader.batches(), "{loader:?}");
                    assert!(sizes.iter().all(|&size| size > 0 && (!drop_last || size == sizes[0])));
                }
            }
        }
    }
}

/// Sample 11 panics, sample 17 is damaged.
struct Damaged;

impl Dataset for Damaged {
    type Sample = i64;

    fn len(&self) -> usize {
        30
    }

    fn sample(&self, index: usize) -> Result<i64, DataError> {
        match index {
            11 => panic!("cannot make {index}"),
            17 => Err(DataError::other("rotten")),
            _ => Ok(index as i64),
        }
    }

    fn origin(&self, index: usize) -> Option<String> {
        Some(format!("crate {index}"))
    }
}

#[test]
fn damaged_samples_are_named_and_the_rest_comes() {
    for workers in [0, 1, 3] {
        let loader = DataLoader::new(Damaged).batch(5).workers(workers);
        let all: Vec<_> = loader.on(&Device::cpu()).collect();
        assert_eq!(all.len(), 6);
        let errors: Vec<String> =
            all.iter().filter_map(|b| b.as_ref().err().map(|e| e.to_string())).collect();
        assert_eq!(
            errors,
            ["sample 11 (crate 11): it panicked: cannot make 11", "sample 17 (crate 17): rotten"]
        );
        assert!(matches!(&all[2], Err(DataError::Sample { index: 11, .. })));
        assert_eq!(all[5].as_ref().unwrap().to_vec::<i64>().unwrap(), [25, 26, 27, 28, 29]);
    }
}

#[test]
fn a_transform_that_panics_is_named_too() {
    let loader = DataLoader::new(numbers(4)).batch(2).workers(1);
    let loader =
        loader.transform(|number, _| Image::new(vec![0.0; 4], 1, 2, 2).crop(number as usize, 0, 1, 1));
    let all: Vec<_> = loader.on(&Device::cpu()).collect();
    assert!(all[0].is_ok());
    let error = all[1].as_ref().unwrap_err();
    assert!(matches!(error.root(), DataError::Panicked { .. }));
    assert!(
        error.to_string().starts_with("sample 2 (number 2): it panicked: crop: 1 by 1 at (2, 0)"),
        "{error}"
    );
}

#[test]
fn a_data_set_that_never_answers_is_given_up() {
    let (open, gate) = std::sync::mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let loader = DataLoader::new(numbers(10)).batch(2).workers(2).timeout(Duration::from_millis(50));
    let loader = loader.transform(move |number, _| {
        if number == 5 {
            let _ = gate.lock().unwrap().recv();
        }
        number
    });
    let mut batches = loader.on(&Device::cpu());
    assert_eq!(values(batches.next().unwrap()), [0, 1]);
    assert_eq!(values(batches.next().unwrap()), [2, 3]);
    assert!(matches!(batches.next(), Some(Err(DataError::Timeout { batch: 2, .. }))));
    assert!(batches.next().is_none());
    drop(batches);
    drop(open);
}

#[test]
fn shapes_that_differ_are_named_or_padded() {
    let device = Device::cpu();
    let words = vec![(vec![1i64, 2], 0i64), (vec![3], 1), (vec![4, 5, 6], 2)];
    let loader = DataLoader::new(words).batch(3);
    let error = loader.on(&device).next().unwrap().unwrap_err();
    assert!(matches!(error, DataError::Sample { index: 1, .. }));
    assert_eq!(
        error.to_string(),
        "sample 1: its shape is [1], the first of the batch has [2]; `pad` fills shorter ones up"
    );
    let (x, y) = loader.clone().pad(-1.0).on(&device).next().unwrap().unwrap();
    assert_eq!((x.shape(), x.to_vec::<i64>().unwrap()), ([3, 3].into(), vec![1, 2, -1, 3, -1, -1, 4, 5, 6]));
    assert_eq!(y.to_vec::<i64>().unwrap(), [0, 1, 2]);

    let arrays = vec![Array::new(vec![1u8, 2, 3, 4], [2, 2]), Array::new(vec![5, 6, 7], [1, 3])];
    let x = DataLoader::new(arrays).batch(2).pad(9.0).on(&device).next().unwrap().unwrap();
    assert_eq!(x.shape(), [2, 2, 3].into());
    assert_eq!(x.to_vec::<u8>().unwrap(), [1, 2, 9, 3, 4, 9, 5, 6, 7, 9, 9, 9]);

    let sentences = vec![Sequence(vec![1.5f32]), Sequence(vec![]), Sequence(vec![2.0, 3.0])];
    let (x, lengths) = DataLoader::new(sentences).batch(3).on(&device).next().unwrap().unwrap();
    assert_eq!(x.to_vec::<f32>().unwrap(), [1.5, 0.0, 0.0, 0.0, 2.0, 3.0]);
    assert_eq!(lengths.to_vec::<i64>().unwrap(), [1, 0, 2]);
    // Ranks cannot be padded.
    let arrays = vec![Array::new(vec![1.0f32], [1]), Array::new(vec![1.0], [1, 1])];
    assert!(DataLoader::new(arrays).batch(2).pad(0.0).on(&device).next().unwrap().is_err());
}

#[test]
fn samples_become_tensors_of_their_dtype() {
    let device = Device::cpu();
    let sample = (1.5f64, [true, false], (7u8, "name".to_string()));
    let (a, b, (c, names)) = DataLoader::new(vec![sample; 3]).batch(3).on(&device).next().unwrap().unwrap();
    assert_eq!((a.dtype(), a.shape()), (DType::F64, [3].into()));
    assert_eq!((b.dtype(), b.shape()), (DType::Bool, [3, 2].into()));
    assert_eq!((c.to_vec::<u8>().unwrap(), names), (vec![7; 3], vec!["name".to_string(); 3]));
    let image = Image::new(vec![0.25; 6], 1, 2, 3);
    let x = DataLoader::new(vec![image; 2]).batch(2).on(&device).next().unwrap().unwrap();
    assert_eq!((x.shape(), x.to_vec::<f32>().unwrap()), ([2, 1, 2, 3].into(), vec![0.25; 12]));
}

#[test]
fn sets_are_put_together_from_sets() {
    let device = Device::cpu();
    let x = Tensor::arange(0, 12, 1, &device).reshape([6, 2]);
    let y = Tensor::arange(10, 16, 1, &device);
    let set = Rows::of(&x).unwrap().zip(Rows::of(&y).unwrap());
    let (train, test) = split(6, 4, 3);
    assert_eq!((train.len(), test.len()), (4, 2));
    let both = (&set).subset(test.clone()).chain((&set).subset(train));
    let seen: Vec<i64> =
        (0..6).map(|i| i64::from_le_bytes(both.sample(i).unwrap().1.bytes[..].try_into().unwrap())).collect();
    assert_eq!(seen[0], 10 + test[0] as i64);
    let mut sorted = seen.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, [10, 11, 12, 13, 14, 15]);
    let shared: Arc<dyn Dataset<Sample = _>> = Arc::new(set);
    let (x, _) = DataLoader::new(shared).batch(4).shuffle(1).on(&device).next().unwrap().unwrap();
    assert_eq!((x.dtype(), x.shape()), (DType::I64, [4, 2].into()));
    let samples: Vec<i64> = (0..3).collect();
    assert_eq!(samples.get(3), None, "slices keep their own method");
    assert!(matches!(vec![1i64].sample(3), Err(DataError::NoSample { len: 1 })));
}

/// Notes which threads stage, and how often.
struct Noted {
    inner: Arc<dyn Driver>,
    staged: Arc<Mutex<Vec<String>>>,
}

impl Decorator for Noted {
    fn inner(&self) -> &dyn Driver {
        &*self.inner
    }

    fn stage(&self, data: Vec<Data>) -> Vec<Data> {
        let thread = std::thread::current().name().unwrap_or_default().to_string();
        self.staged.lock().unwrap().push(thread);
        self.inner.stage(data)
    }
}

#[test]
fn workers_stage_and_batches_are_on_the_device() {
    let staged: Arc<Mutex<Vec<String>>> = Arc::default();
    let noted = Noted { inner: Device::cpu().driver().clone(), staged: staged.clone() };
    let device = Device::wrap("noted", Arc::new(noted)).unwrap();
    let loader = DataLoader::new(vec![([1.0f32; 4], 1i64); 12]).batch(4).workers(2);
    for batch in loader.on(&device) {
        let (x, _) = batch.unwrap();
        assert_eq!(x.device(), device);
        assert_eq!(x.sum(()).item::<f32>().unwrap(), 16.0);
    }
    let staged = staged.lock().unwrap();
    assert_eq!(staged.len(), 6, "each part of each batch once");
    assert!(staged.iter().all(|thread| thread.starts_with("kiln-data-")), "{staged:?}");
}

#[test]
fn an_epoch_that_is_left_ends_its_workers() {
    let (set, device) = (numbers(10_000), Device::cpu());
    let asked = set.asked.clone();
    let loader = DataLoader::new(set).batch(10).workers(3).prefetch(2);
    let mut batches = loader.on(&device);
    batches.next();
    drop(batches);
    drop(loader);
    assert_eq!(Arc::strong_count(&asked), 1, "nobody holds the data set");
    // Two were taken, six may be held, three in hand.
    assert!(asked.load(Ordering::Relaxed) <= 110, "{asked:?}");
}
