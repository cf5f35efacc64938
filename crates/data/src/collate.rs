//! Samples → batches: numbers, arrays and tuples of them become tensors with the batch as the first axis.
//!
//! Packing is done by the workers, into host memory that the device is ready to take; placing it as tensors is done where
//! the batch is taken.

use crate::{Array, Image};
use kiln_tensor::{Bytes, DType, Data, Device, Element, MAX_RANK, Meta, Number, Shape, Tensor};

/// What a [`DataLoader`](crate::DataLoader) can make batches of.
///
/// | sample | batch |
/// |---|---|
/// | `f32`, `i64`, … , `bool` | tensor `[batch]` |
/// | `[T; N]`, `Vec<T>` | tensor `[batch, n]` |
/// | [`Array<T>`], [`Image`], [`Data`] | tensor `[batch, …]` |
/// | [`Sequence<T>`] | padded tensor `[batch, longest]`, and the lengths `[batch]`, i64 |
/// | `String` | `Vec<String>` |
/// | tuples of up to four of these | tuples |
///
/// A struct of one's own becomes a tuple in [`DataLoader::transform`](crate::DataLoader::transform), or implements this
/// by handing its fields to those above.
#[doc(alias("collate_fn"))]
pub trait Collate: Sized + Send + 'static {
    /// A batch on the host.
    type Packed: Send + 'static;
    /// A batch on the device.
    type Batch;

    /// Packs samples. `padding` fills shorter ones up, where it is given.
    fn pack(samples: Vec<Self>, padding: Option<f64>) -> Result<Self::Packed, Misfit>;

    /// Makes it ready for upload.
    fn stage(packed: Self::Packed, _device: &Device) -> Self::Packed {
        packed
    }

    /// The batch as tensors.
    fn place(packed: Self::Packed, device: &Device) -> Self::Batch;
}

/// Samples that do not fit into one batch.
#[derive(Clone, Debug, PartialEq)]
pub enum Misfit {
    /// The sample at this place has another shape than the first.
    Shape {
        /// Its place among those that were packed.
        at: usize,
        /// The first sample's shape.
        first: Shape,
        /// Its own.
        found: Shape,
    },
    /// Together they are more than a tensor can hold.
    TooLarge {
        /// How many there are.
        samples: usize,
        /// The shape of each.
        shape: Shape,
    },
}

/// Items of a length of their own, such as the words of a sentence: its batch is always padded, with 0 unless
/// [`DataLoader::pad`](crate::DataLoader::pad) says otherwise, and has the lengths beside it.
#[doc(alias("pad_sequence", "pad_packed_sequence"))]
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence<T>(
    /// The items.
    pub Vec<T>,
);

/// Packs samples of one shape, or pads them to the largest extents.
fn pack<T: Element>(samples: Vec<(Shape, Vec<T>)>, padding: Option<f64>) -> Result<Data, Misfit> {
    let first = samples.first().map_or_else(Shape::default, |sample| sample.0);
    let mut shape = first;
    for (at, (found, _)) in samples.iter().enumerate() {
        if found == &first {
            continue;
        }
        if padding.is_none() || found.len() != first.len() {
            return Err(Misfit::Shape { at, first, found: *found });
        }
        for (axis, &extent) in found.iter().enumerate() {
            shape[axis] = shape[axis].max(extent);
        }
    }
    let meta = stacked(T::DTYPE, samples.len(), shape)?;
    let mut all = Vec::with_capacity(meta.bytes());
    let fill = fill(T::DTYPE, padding);
    for (found, items) in samples {
        put(&mut all, &T::into_bytes(items), &found, &shape, &fill);
    }
    Ok(Data::new(meta, Bytes::new(all)))
}

/// The meta of `samples` of a shape.
fn stacked(dtype: DType, samples: usize, shape: Shape) -> Result<Meta, Misfit> {
    let too_large = || Misfit::TooLarge { samples, shape };
    let shape = shape.inserted(0, samples).filter(|all| all.len() <= MAX_RANK).ok_or_else(too_large)?;
    let meta = Meta { dtype, shape };
    meta.check().map_err(|_| too_large())?;
    Ok(meta)
}

/// The bytes of an element that fills up.
fn fill(dtype: DType, padding: Option<f64>) -> Vec<u8> {
    let bits = Number::Float(padding.unwrap_or(0.0)).scalar(dtype).bits();
    bits.to_le_bytes()[..dtype.size()].to_vec()
}

/// Appends the bytes of an array of shape `have` as one of shape `want`, which is at least as large on every axis.
fn put(out: &mut Vec<u8>, bytes: &[u8], have: &[usize], want: &[usize], fill: &[u8]) {
    if have == want {
        return out.extend_from_slice(bytes);
    }
    let size = |shape: &[usize]| shape.iter().product::<usize>() * fill.len();
    let (inner_have, inner_want) = (size(&have[1..]), size(&want[1..]));
    for at in 0..have[0] {
        put(out, &bytes[at * inner_have..][..inner_have], &have[1..], &want[1..], fill);
    }
    let missing = (want[0] - have[0]) * inner_want / fill.len();
    out.extend(std::iter::repeat_n(fill, missing).flatten());
}

fn staged(packed: Data, device: &Device) -> Data {
    // A device gives back as many as it was given; one that does not is not waited for.
    device.stage(vec![packed.clone()]).pop().unwrap_or(packed)
}

macro_rules! tensors {
    ($([$($generic:tt)*] $type:ty, |$samples:ident, $padding:ident| $pack:expr;)*) => {$(
        impl<$($generic)*> Collate for $type {
            type Packed = Data;
            type Batch = Tensor;
            fn pack($samples: Vec<Self>, $padding: Option<f64>) -> Result<Data, Misfit> {
                $pack
            }
            fn stage(packed: Data, device: &Device) -> Data {
                staged(packed, device)
            }
            fn place(packed: Data, device: &Device) -> Tensor {
                Tensor::from_data(packed, device)
            }
        }
    )*};
}

tensors! {
    [] f64, |samples, _padding| numbers(samples);
    [] f32, |samples, _padding| numbers(samples);
    [] i64, |samples, _padding| numbers(samples);
    [] i32, |samples, _padding| numbers(samples);
    [] i16, |samples, _padding| numbers(samples);
    [] i8, |samples, _padding| numbers(samples);
    [] u64, |samples, _padding| numbers(samples);
    [] u32, |samples, _padding| numbers(samples);
    [] u16, |samples, _padding| numbers(samples);
    [] u8, |samples, _padding| numbers(samples);
    [] bool, |samples, _padding| numbers(samples);
    [T: Element, const N: usize] [T; N], |samples, _padding| {
        let meta = stacked(T::DTYPE, samples.len(), Shape::from([N]))?;
        Ok(Data::new(meta, Bytes::new(T::into_bytes(samples.into_iter().flatten().collect()))))
    };
    [T: Element] Vec<T>, |samples, padding| {
        pack(samples.into_iter().map(|items| (Shape::from([items.len()]), items)).collect(), padding)
    };
    [T: Element] Array<T>, |samples, padding| {
        pack(samples.into_iter().map(Array::into_parts).collect(), padding)
    };
    [] Image, |samples, padding| {
        pack(samples.into_iter().map(|image| (image.shape(), image.into_pixels())).collect(), padding)
    };
    [] Data, |samples, padding| rows(samples, padding);
}

fn numbers<T: Element>(samples: Vec<T>) -> Result<Data, Misfit> {
    let meta = stacked(T::DTYPE, samples.len(), Shape::default())?;
    Ok(Data::new(meta, Bytes::new(T::into_bytes(samples))))
}

/// Values of any plain dtype. A sample of another dtype than the first does not fit.
fn rows(samples: Vec<Data>, padding: Option<f64>) -> Result<Data, Misfit> {
    let Some(first) = samples.first().map(|sample| sample.meta) else {
        return Ok(Data::new(Meta::new(DType::F32, [0]), Bytes::new(Vec::new())));
    };
    let mut shape = first.shape;
    for (at, sample) in samples.iter().enumerate() {
        let found = sample.meta.shape;
        let same = sample.meta.dtype == first.dtype && found.len() == shape.len();
        if !same || padding.is_none() && found != first.shape {
            return Err(Misfit::Shape { at, first: first.shape, found });
        }
        for (axis, &extent) in found.iter().enumerate() {
            shape[axis] = shape[axis].max(extent);
        }
    }
    let meta = stacked(first.dtype, samples.len(), shape)?;
    let mut all = Vec::with_capacity(meta.bytes());
    let fill = fill(first.dtype, padding);
    for sample in &samples {
        put(&mut all, &sample.bytes, &sample.meta.shape, &shape, &fill);
    }
    Ok(Data::new(meta, Bytes::new(all)))
}

impl<T: Element> Collate for Sequence<T> {
    type Packed = (Data, Data);
    /// The padded items, and how many are not padding.
    type Batch = (Tensor, Tensor);

    fn pack(samples: Vec<Self>, padding: Option<f64>) -> Result<(Data, Data), Misfit> {
        let lengths = samples.iter().map(|Sequence(items)| items.len() as i64).collect();
        let items = samples.into_iter().map(|Sequence(items)| items).collect();
        Ok((Vec::pack(items, Some(padding.unwrap_or(0.0)))?, numbers::<i64>(lengths)?))
    }

    fn stage((items, lengths): (Data, Data), device: &Device) -> (Data, Data) {
        (staged(items, device), staged(lengths, device))
    }

    fn place((items, lengths): (Data, Data), device: &Device) -> (Tensor, Tensor) {
        (Tensor::from_data(items, device), Tensor::from_data(lengths, device))
    }
}

impl Collate for String {
    type Packed = Vec<String>;
    type Batch = Vec<String>;

    fn pack(samples: Vec<String>, _padding: Option<f64>) -> Result<Vec<String>, Misfit> {
        Ok(samples)
    }

    fn place(packed: Vec<String>, _device: &Device) -> Vec<String> {
        packed
    }
}

macro_rules! tuples {
    ($(($($part:ident $field:ident $item:ident),*);)*) => {$(
        impl<$($part: Collate),*> Collate for ($($part,)*) {
            type Packed = ($($part::Packed,)*);
            type Batch = ($($part::Batch,)*);
            fn pack(samples: Vec<Self>, padding: Option<f64>) -> Result<Self::Packed, Misfit> {
                $(let mut $field = Vec::with_capacity(samples.len());)*
                for ($($item,)*) in samples {
                    $($field.push($item);)*
                }
                Ok(($($part::pack($field, padding)?,)*))
            }
            fn stage(packed: Self::Packed, device: &Device) -> Self::Packed {
                let ($($field,)*) = packed;
                ($($part::stage($field, device),)*)
            }
            fn place(packed: Self::Packed, device: &Device) -> Self::Batch {
                let ($($field,)*) = packed;
                ($($part::place($field, device),)*)
            }
        }
    )*};
}
tuples! {
    (A a x);
    (A a x, B b y);
    (A a x, B b y, C c z);
    (A a x, B b y, C c z, D d w);
}
