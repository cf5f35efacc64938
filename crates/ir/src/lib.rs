//! The waist: operations as data.
//!
//! A tensor program is a stream of [`Item`]s: a [`Node`] computes values from values, a `Free` ends one. Everything
//! above records such streams and everything below executes, sends, prints or stores them. This crate holds what both
//! sides must agree on: the operations ([`Op`], the elementwise tables), their shapes and dtypes ([`infer`]), their
//! text and wire forms, and the relative form that recognises a recurring step. It has no IO, no threads, no clock and
//! no `unsafe`; it computes no tensor values.
#![forbid(unsafe_code)]

mod dtype;
mod scalar;
mod shape;

#[macro_use]
mod table;
pub mod math;

mod op;
mod form;
mod node;
mod infer;
mod verify;
pub mod custom;

mod expr;
pub mod philox;
pub mod quant;

pub mod text;
pub mod wire;
pub mod relative;

pub use dtype::{DType, Kind, promote};
pub use expr::{Build, Probe, V};
pub use form::{Field, FieldSink, FieldSource, FormError};
pub use infer::{OpError, infer, infer_binary, infer_unary};
pub use node::{Id, IdRange, Item, Node};
pub use op::{
    AxisSet, Class, Conv, ConvKind, CustomCall, GatherKind, Move, Named, Op, OpSet, Pool, PoolKind,
    RandomKind, Real, ReduceKind, ScanKind, ScatterKind, attention_scores, attention_weights, lower,
};
pub use scalar::Scalar;
pub use shape::{Dims, MAX_RANK, Meta, Shape, broadcast};
pub use table::{Binary, Domain, Grad1, Grad2, Unary};
pub use verify::{Program, Scope, Verified, VerifyError, verify};
