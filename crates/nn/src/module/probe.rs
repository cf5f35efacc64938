//! Whether a field is a module, without a word from the user: `(&&Probe(field)).part(..)` makes the compiler look for a
//! method on `&&Probe` first, which modules have, then on `&Probe`, which settings have, then on `Probe`, which all have.

#![allow(missing_docs)]

use crate::{Module, Part, PartMut};
use kiln_tensor::{ConvOptions, DType, Extents, PadMode, PoolOptions};
use std::fmt::Display;

pub struct Probe<'a, T: ?Sized>(pub &'a T);
impl<T: ?Sized> Clone for Probe<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: ?Sized> Copy for Probe<'_, T> {}

pub struct ProbeMut<'a, T: ?Sized>(pub &'a mut T);

/// A type whose values are shown when a module that has one is printed.
pub trait Setting: Display {}

macro_rules! settings {
    ($($type:ty)*) => { $(impl Setting for $type {})* };
}
settings!(bool f32 f64 i8 i16 i32 i64 isize u8 u16 u32 u64 usize &'static str DType ConvOptions Extents PadMode PoolOptions);

pub trait Is {
    fn part(&self, name: &str, f: &mut dyn FnMut(&str, Part<'_>));
}

impl<T: Module> Is for &Probe<'_, T> {
    fn part(&self, name: &str, f: &mut dyn FnMut(&str, Part<'_>)) {
        f(name, Part::Module(self.0));
    }
}

pub trait Shows {
    fn part(&self, name: &str, f: &mut dyn FnMut(&str, Part<'_>));
}

impl<T: Setting> Shows for Probe<'_, T> {
    fn part(&self, name: &str, f: &mut dyn FnMut(&str, Part<'_>)) {
        f(name, Part::Setting(self.0));
    }
}

pub trait IsNot: Sized {
    fn part(self, _name: &str, _f: &mut dyn FnMut(&str, Part<'_>)) {}
}

impl<T: ?Sized> IsNot for Probe<'_, T> {}

/// Of `ProbeMut(field)`, which is tried by value before it is by reference.
pub trait IsMut {
    fn part(self, name: &str, f: &mut dyn FnMut(&str, PartMut<'_>));
}

impl<T: Module> IsMut for ProbeMut<'_, T> {
    fn part(self, name: &str, f: &mut dyn FnMut(&str, PartMut<'_>)) {
        f(name, PartMut::Module(self.0));
    }
}

pub trait IsNotMut {
    fn part(&self, _name: &str, _f: &mut dyn FnMut(&str, PartMut<'_>)) {}
}

impl<T: ?Sized> IsNotMut for ProbeMut<'_, T> {}
