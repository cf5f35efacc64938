//! Modules made of modules: lists, options, boxes, maps and tuples.

use crate::{Module, Part, PartMut};
use kiln_tensor::Tensor;
use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;

/// A parameter is a module of one.
impl Module for Tensor {
    fn parts(&self, f: &mut dyn FnMut(&str, Part<'_>)) {
        f("", Part::Parameter(self));
    }
    fn parts_mut(&mut self, f: &mut dyn FnMut(&str, PartMut<'_>)) {
        f("", PartMut::Parameter(self));
    }
}

/// A part that may be missing has no parameters then.
impl<M: Module> Module for Option<M> {
    fn parts(&self, f: &mut dyn FnMut(&str, Part<'_>)) {
        self.iter().for_each(|module| f("", Part::Module(module)));
    }
    fn parts_mut(&mut self, f: &mut dyn FnMut(&str, PartMut<'_>)) {
        self.iter_mut().for_each(|module| f("", PartMut::Module(module)));
    }
    fn kind(&self) -> String {
        self.as_ref().map_or(String::new(), Module::kind)
    }
}

impl<M: Module + ?Sized> Module for Box<M> {
    fn parts(&self, f: &mut dyn FnMut(&str, Part<'_>)) {
        (**self).parts(f);
    }
    fn parts_mut(&mut self, f: &mut dyn FnMut(&str, PartMut<'_>)) {
        (**self).parts_mut(f);
    }
    fn kind(&self) -> String {
        (**self).kind()
    }
}

/// The parts of a list are named by number.
impl<M: Module> Module for Vec<M> {
    fn parts(&self, f: &mut dyn FnMut(&str, Part<'_>)) {
        self.iter().enumerate().for_each(|(i, module)| f(&i.to_string(), Part::Module(module)));
    }
    fn parts_mut(&mut self, f: &mut dyn FnMut(&str, PartMut<'_>)) {
        self.iter_mut().enumerate().for_each(|(i, module)| f(&i.to_string(), PartMut::Module(module)));
    }
}

/// The parts of an array are named by number.
impl<M: Module, const N: usize> Module for [M; N] {
    fn parts(&self, f: &mut dyn FnMut(&str, Part<'_>)) {
        self.iter().enumerate().for_each(|(i, module)| f(&i.to_string(), Part::Module(module)));
    }
    fn parts_mut(&mut self, f: &mut dyn FnMut(&str, PartMut<'_>)) {
        self.iter_mut().enumerate().for_each(|(i, module)| f(&i.to_string(), PartMut::Module(module)));
    }
}

/// The parts of a map are named by their keys.
impl<M: Module> Module for BTreeMap<String, M> {
    fn parts(&self, f: &mut dyn FnMut(&str, Part<'_>)) {
        self.iter().for_each(|(name, module)| f(name, Part::Module(module)));
    }
    fn parts_mut(&mut self, f: &mut dyn FnMut(&str, PartMut<'_>)) {
        self.iter_mut().for_each(|(name, module)| f(name, PartMut::Module(module)));
    }
}

/// The parts of a map are named by their keys, and come in the order of these.
impl<M: Module, S: BuildHasher> Module for HashMap<String, M, S> {
    fn parts(&self, f: &mut dyn FnMut(&str, Part<'_>)) {
        let mut all: Vec<_> = self.iter().collect();
        all.sort_by_key(|(name, _)| *name);
        all.into_iter().for_each(|(name, module)| f(name, Part::Module(module)));
    }
    fn parts_mut(&mut self, f: &mut dyn FnMut(&str, PartMut<'_>)) {
        let mut all: Vec<_> = self.iter_mut().collect();
        all.sort_by(|a, b| a.0.cmp(b.0));
        all.into_iter().for_each(|(name, module)| f(name, PartMut::Module(module)));
    }
}

macro_rules! tuples {
    ($($($name:ident $i:tt)*;)*) => {$(
        /// The parts of a tuple are named by number.
        impl<$($name: Module),*> Module for ($($name,)*) {
            fn parts(&self, f: &mut dyn FnMut(&str, Part<'_>)) {
                $(f(stringify!($i), Part::Module(&self.$i));)*
            }
            fn parts_mut(&mut self, f: &mut dyn FnMut(&str, PartMut<'_>)) {
                $(f(stringify!($i), PartMut::Module(&mut self.$i));)*
            }
        }
    )*};
}
tuples! {
    A 0;
    A 0 B 1;
    A 0 B 1 C 2;
    A 0 B 1 C 2 D 3;
    A 0 B 1 C 2 D 3 E 4;
    A 0 B 1 C 2 D 3 E 4 F 5;
}
